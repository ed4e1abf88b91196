//! The threads of a process: programs that launch, and the monitor thread of the library.

use std::rc::Rc;

use tessera_throttle::Nanos;
use tessera_throttle::captures::Captures;
use tessera_throttle::controller::{GpuController, LimitRule, Sleep, WindowDemand};
use tessera_throttle::costs::CostTable;
use tessera_throttle::driver::StreamName;
use tessera_throttle::gate::{BlockedLaunch, Entered, HeldBack, Launch, LaunchGate};

use super::World;
use crate::gpu::{Gpu, MAIN_THREAD, SimulatedDriver};
use crate::programs::{Call, Program};

/// A sleep at least this long is a safety net in the library. The simulation sleeps on for ever.
const SAFETY_NET: Nanos = Nanos::from_millis(100);

type Gate = LaunchGate<u32>;

/// A process: the state of the library in it, and its threads.
pub(super) struct Process {
    pub(super) container: usize,
    program: Program,
    driver: SimulatedDriver,
    pub(super) gate: &'static Gate,
    costs: CostTable,
    captures: Captures,
    controller: GpuController,
    pub(super) threads: Vec<Thread>,
    pub(super) demand: WindowDemand,
    pub(super) monitor: Monitor,
    /// The process is stopped by a signal until then.
    pub(super) stopped_until: Nanos,
}

/// What the monitor thread sleeps on, and when it wakes at the latest.
pub(super) struct Monitor {
    pub(super) sleep: Sleep,
    pub(super) wakes_at: Nanos,
}

pub(super) struct Thread {
    pub(super) state: State,
    pub(super) launches: u64,
    /// End of the thread's work that it has not waited for.
    end: Nanos,
    /// The longest time for which a launch was held back.
    pub(super) longest_wait: Nanos,
}

pub(super) enum State {
    /// Launches at this moment.
    Ready(Nanos),
    /// Sleeps until the gate opens.
    WaitsForOpen(BlockedLaunch<'static, u32>),
    /// Tries again at this moment.
    Retries(Nanos, BlockedLaunch<'static, u32>),
    /// Is in a call of the driver until this moment.
    InCall(Nanos, Launch<'static, u32>),
}

impl Thread {
    /// Returns the moment at which the thread runs next, or `None` while it sleeps at the gate.
    pub(super) fn runs_at(&self) -> Option<Nanos> {
        match self.state {
            State::Ready(at) | State::Retries(at, _) | State::InCall(at, _) => Some(at),
            State::WaitsForOpen(_) => None,
        }
    }
}

impl World {
    pub(super) fn run_thread(&mut self, process: usize, thread: usize) {
        let now = self.now();
        let own = &mut self.processes[process];
        let (program, gate) = (own.program, own.gate);
        own.driver.thread.set(MAIN_THREAD + thread as u64);
        let state = std::mem::replace(&mut own.threads[thread].state, State::Ready(Nanos::MAX));
        let launch = own.threads[thread].launches;
        let stream = program.stream(process * 64 + thread, launch);
        let id = own.driver.id(stream);
        let mut must_notify = false;
        let (entered, blocked) = match state {
            State::InCall(_, launched) => {
                launched.end(&own.driver, true);
                own.threads[thread].state = State::Ready(now + program.launch_time);
                return;
            }
            State::Ready(_) if !gate.is_limited() => {
                // Nothing is limited: the library calls the driver at once.
                own.call_driver(now, thread, stream);
                return;
            }
            State::Ready(_) => match gate.try_enter(&own.driver, id, Some(&own.costs)) {
                Ok(entered) => (Ok(entered), None),
                Err(_) => {
                    let (blocked, is_unknown) = gate.block(now);
                    must_notify = is_unknown;
                    // The library tries again after it has registered as blocked.
                    (blocked.try_enter(&own.driver, id, &own.costs, now), Some(blocked))
                }
            },
            State::WaitsForOpen(mut blocked) => {
                blocked.was_closed(now);
                (blocked.try_enter(&own.driver, id, &own.costs, now), Some(blocked))
            }
            State::Retries(_, blocked) => {
                (blocked.try_enter(&own.driver, id, &own.costs, now), Some(blocked))
            }
        };
        match (entered, blocked) {
            (Err(HeldBack::Closed), Some(blocked)) => {
                own.threads[thread].state = State::WaitsForOpen(blocked);
            }
            (Err(HeldBack::Full(sleep)), Some(blocked)) => {
                own.threads[thread].state = State::Retries(now + sleep, blocked);
            }
            (Ok(entered), blocked) => {
                must_notify |= entered == Entered::FirstWork && gate.mark_busy(now);
                if let Some(blocked) = blocked {
                    let wait = blocked.finish(now);
                    let longest = &mut own.threads[thread].longest_wait;
                    *longest = wait.max(*longest);
                }
                own.launch(now, thread, stream);
            }
            (Err(_), None) => unreachable!("a launch that is held back is blocked"),
        }
        if must_notify {
            self.notify(process);
        }
    }

    pub(super) fn run_monitor(&mut self, number: usize) {
        let now = self.now();
        let has_arbiter = self.arbiter.is_some();
        let process = &mut self.processes[number];
        process.driver.thread.set(u64::MAX);
        let container = &mut self.containers[process.container];
        let gate = process.gate;
        if !process.controller.needs_round(gate) {
            process.controller.skip_round();
            process.monitor = Monitor { sleep: Sleep::UntilWork, wakes_at: Nanos::MAX };
            return;
        }
        let rule = LimitRule { percent: gate.percent(), has_arbiter: gate.is_limited() && has_arbiter };
        if process.controller.set_rule(now, rule, gate) {
            container.account.reset(now);
        }
        if gate.is_busy() {
            let (driver, costs, captures) = (&process.driver, &process.costs, &process.captures);
            if let Some(charge) = process.controller.follow(now, driver, gate, costs, captures) {
                container.account.charge(charge);
            }
        }
        let decision = if rule.has_arbiter {
            process.controller.follow_window(now, container.window, gate)
        } else {
            process.controller.follow_account(now, container.account.pacer, gate)
        };
        let timeout = match decision.sleep {
            Sleep::UntilWork => Nanos::MAX,
            Sleep::For(time) => time,
            Sleep::UntilWindowChanges { timeout, .. } if timeout >= SAFETY_NET => Nanos::MAX,
            Sleep::UntilWindowChanges { timeout, .. } => timeout,
        };
        process.monitor = Monitor { sleep: decision.sleep, wakes_at: now + timeout };
        if let Some(demand) = decision.report {
            process.demand = demand;
        }
        if decision.wake_blocked {
            self.wake_blocked(number);
        }
        assert_eq!(self.threads_asleep_at_an_open_gate(number), 0, "a wake-up is lost");
        if decision.report.is_some() {
            let soon = self.soon();
            if let Some(arbiter) = &mut self.arbiter {
                arbiter.acts_at = arbiter.acts_at.min(soon);
            }
        }
    }

    fn wake_blocked(&mut self, process: usize) {
        for thread in 0..self.processes[process].threads.len() {
            let soon = self.soon();
            let state = &mut self.processes[process].threads[thread].state;
            if let State::WaitsForOpen(_) = state {
                let State::WaitsForOpen(mut blocked) = std::mem::replace(state, State::Ready(Nanos::MAX))
                else {
                    unreachable!()
                };
                blocked.was_closed(soon);
                *state = State::Retries(soon, blocked);
            }
        }
    }
}

impl Process {
    pub(super) fn new(container: usize, program: Program, gpu: Rc<Gpu>) -> Self {
        let now = gpu.now.get();
        let gate: &'static Gate = Box::leak(Box::default());
        let ready =
            |_| Thread { state: State::Ready(now), launches: 0, end: Nanos::ZERO, longest_wait: Nanos::ZERO };
        Self {
            container,
            program,
            driver: SimulatedDriver::new(gpu, container),
            gate,
            costs: CostTable::default(),
            captures: Captures::default(),
            controller: GpuController::default(),
            threads: (0..program.threads).map(ready).collect(),
            demand: WindowDemand::default(),
            monitor: Monitor { sleep: Sleep::UntilWork, wakes_at: now },
            stopped_until: Nanos::ZERO,
        }
    }

    /// Stops the process for a while, as a signal does.
    pub(super) fn stop_until(&mut self, resumes: Nanos) {
        self.stopped_until = resumes;
        self.monitor.wakes_at = self.monitor.wakes_at.max(resumes);
        for thread in &mut self.threads {
            if let State::Ready(at) | State::Retries(at, _) | State::InCall(at, _) = &mut thread.state {
                *at = resumes.max(*at);
            }
        }
    }

    /// Wakes the monitor thread at a moment, or when the process goes on.
    pub(super) fn wake_monitor(&mut self, at: Nanos) {
        self.monitor.wakes_at = self.monitor.wakes_at.min(at.max(self.stopped_until));
    }

    /// Returns the number of threads that sleep though the gate is open.
    pub(super) fn threads_asleep_at_an_open_gate(&self) -> usize {
        let threads = self.threads.iter().filter(|_| !self.gate.is_closed());
        threads.filter(|thread| matches!(thread.state, State::WaitsForOpen(_))).count()
    }

    /// Launches through the gate, which the thread has entered.
    fn launch(&mut self, now: Nanos, thread: usize, stream: StreamName) {
        let id = self.driver.id(stream);
        let key = self.program.key(self.threads[thread].launches);
        let launch = self.gate.begin(&self.driver, id, key, &self.costs);
        let end = self.call_driver(now, thread, stream);
        if self.program.call == Call::Blocking {
            self.threads[thread].state = State::InCall(end, launch);
            return;
        }
        launch.end(&self.driver, true);
        if self.program.call == Call::NewStream {
            self.gate.forget_stream(&self.driver, stream.handle, &self.costs);
            self.driver.destroy(stream);
        }
    }

    /// Calls the driver; returns when the work will have ended. The thread is ready for its next launch
    /// after that.
    fn call_driver(&mut self, now: Nanos, thread: usize, stream: StreamName) -> Nanos {
        let Program { sync_every, pause, launch_time, thinks_every, thinking, call, .. } = self.program;
        let own = &mut self.threads[thread];
        let end = self.driver.launch(stream, self.program.length(own.launches));
        own.end = own.end.max(end);
        own.launches += 1;
        let is_synced = sync_every > 0 && own.launches.is_multiple_of(sync_every);
        let thinks = thinks_every > 0 && own.launches.is_multiple_of(thinks_every);
        let next = now + launch_time + if thinks { thinking } else { Nanos::ZERO };
        own.state = State::Ready(match call {
            Call::Blocking => end + launch_time,
            _ if is_synced => next.max(own.end + launch_time + pause),
            // A real driver blocks the caller when a thousand launches are queued.
            _ => next.max(end - self.program.kernel * 1_000),
        });
        end
    }
}
