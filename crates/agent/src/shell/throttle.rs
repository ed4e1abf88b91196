//! Stops and continues processes by their duty cycles, on a thread of its own.
//!
//! When the agent ends, every stopped process is continued. An agent that is killed cannot do that; the
//! next agent resumes the processes that it finds stopped.

use std::{
    collections::BTreeMap,
    io,
    sync::mpsc::{self, RecvTimeoutError},
    thread,
    time::{Duration, Instant},
};

use tessera_node::processes::{ProcessSignal, Processes};
use tokio_util::sync::CancellationToken;

use crate::controller::DutyCycle;

/// Longest time in which the thread does not notice that the agent ends.
const MAX_WAIT: Duration = Duration::from_millis(200);

/// Time between two stop signals in one pause. Another process of the container may have continued the
/// process.
const REPEAT: Duration = Duration::from_millis(50);

/// Handle of the thread.
#[derive(Debug)]
pub(super) struct Throttle {
    cycles: mpsc::Sender<(ProcessKey, DutyCycle)>,
    thread: thread::JoinHandle<()>,
}

/// Process ID and start time of a process.
type ProcessKey = (u32, u64);

/// A throttled process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Throttled {
    cycle: DutyCycle,
    /// End of the current phase.
    phase_end: Instant,
    is_stopped: bool,
    /// Time of the next signal.
    next_signal: Instant,
}

impl Throttled {
    /// Returns the signal that is due now, if any, and moves on to the next one.
    fn step(&mut self, now: Instant) -> Option<ProcessSignal> {
        if now < self.next_signal {
            return None;
        }
        if now >= self.phase_end {
            self.is_stopped = !self.is_stopped;
            let length = if self.is_stopped { self.cycle.pause } else { self.cycle.run };
            self.phase_end = now + length;
        }
        let repeat = if self.is_stopped { now + REPEAT } else { self.phase_end };
        self.next_signal = repeat.min(self.phase_end);
        Some(if self.is_stopped { ProcessSignal::Stop } else { ProcessSignal::Continue })
    }
}

impl Throttle {
    pub(super) fn start(processes: Processes, stop: CancellationToken) -> io::Result<Self> {
        let (cycles, inbox) = mpsc::channel();
        let work = move || run(&processes, &inbox, &stop);
        Ok(Self { cycles, thread: thread::Builder::new().name("throttle".into()).spawn(work)? })
    }

    /// Waits until no process is stopped any more, after the agent's stop token is cancelled.
    pub(super) fn end(self) {
        let Self { cycles, thread } = self;
        drop(cycles);
        let _panicked = thread.join();
    }

    /// Sets the duty cycle of a process.
    pub(super) fn set(&self, pid: u32, started: u64, cycle: DutyCycle) {
        let _ended = self.cycles.send(((pid, started), cycle));
    }
}

fn run(processes: &Processes, inbox: &mpsc::Receiver<(ProcessKey, DutyCycle)>, stop: &CancellationToken) {
    let mut all: BTreeMap<ProcessKey, Throttled> = BTreeMap::new();
    while !stop.is_cancelled() {
        let now = Instant::now();
        let due = all.values().map(|throttled| throttled.next_signal.saturating_duration_since(now)).min();
        // Without a throttled process, the thread waits for the first one or for the end of the agent.
        let next = match due {
            Some(due) => inbox.recv_timeout(due.min(MAX_WAIT)),
            None => inbox.recv().map_err(|_| RecvTimeoutError::Disconnected),
        };
        match next {
            Ok((key, cycle)) => {
                let now = Instant::now();
                let fresh = Throttled { cycle, phase_end: now, is_stopped: false, next_signal: now };
                all.entry(key).or_insert(fresh).cycle = cycle;
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => break,
        }
        all.retain(|&(pid, started), throttled| {
            let Some(signal) = throttled.step(Instant::now()) else { return true };
            if processes.run_state(pid, started).is_none() {
                return false;
            }
            match processes.signal(pid, started, signal) {
                Ok(()) => true,
                Err(error) => {
                    tracing::warn!(
                        pid, %error,
                        "cannot throttle a process outside its grant; add the capability KILL to the agent's container"
                    );
                    false
                }
            }
        });
    }
    for (pid, started) in all.into_keys() {
        let _ended = processes.signal(pid, started, ProcessSignal::Continue);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_runs_and_pauses_in_turn_and_is_stopped_again_in_a_pause() {
        let begin = Instant::now();
        let milliseconds = Duration::from_millis;
        let cycle = DutyCycle { run: milliseconds(10), pause: milliseconds(120) };
        let mut process = Throttled { cycle, phase_end: begin, is_stopped: false, next_signal: begin };
        let mut signals = Vec::new();
        for at in 0..150 {
            if let Some(signal) = process.step(begin + milliseconds(at)) {
                signals.push((at, signal));
            }
        }
        use ProcessSignal::{Continue, Stop};
        assert_eq!(
            signals,
            [(0, Stop), (50, Stop), (100, Stop), (120, Continue), (130, Stop)],
            "a pause of 120 ms, 10 ms of work, and the next pause"
        );
    }

    #[test]
    fn a_throttled_process_runs_again_when_the_agent_ends() {
        let processes = Processes::at("/proc".into());
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let (pid, stop) = (child.id(), CancellationToken::new());
        let started = processes.started(pid).unwrap();
        let (cycles, inbox) = mpsc::channel();
        let cycle = DutyCycle { run: Duration::from_millis(1), pause: Duration::from_secs(10) };
        cycles.send(((pid, started), cycle)).unwrap();
        let (own, stopped) = (processes.clone(), stop.clone());
        let thread = thread::spawn(move || run(&own, &inbox, &stopped));
        use tessera_node::processes::RunState::{Alive, Stopped};
        while processes.run_state(pid, started) != Some(Stopped) {
            thread::yield_now();
        }
        stop.cancel();
        thread.join().unwrap();
        while processes.run_state(pid, started) != Some(Alive) {
            thread::yield_now();
        }
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
