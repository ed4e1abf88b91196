//! Containers, their processes and an arbiter around the simulated GPU. One actor runs at a time, the
//! earliest one first.

use std::cell::Cell;
use std::rc::Rc;

use tessera_arbiter::{GpuArbiter, Share, TenantReport, WindowAction};
use tessera_throttle::Nanos;
use tessera_throttle::captures::Captures;
use tessera_throttle::controller::{ArbiterWindow, GpuController, LimitRule, Sleep, WindowDemand};
use tessera_throttle::costs::CostTable;
use tessera_throttle::driver::StreamName;
use tessera_throttle::gate::{BlockedLaunch, Entered, HeldBack, Launch, LaunchGate};
use tessera_throttle::pacer::Pacer;

use crate::gpu::{Gpu, MAIN_THREAD, SimulatedDriver};
use crate::programs::{Call, LAUNCH_TIME, Program};

/// A sleep at least this long is a safety net in the library. The simulation sleeps on for ever.
const SAFETY_NET: Nanos = Nanos::from_millis(100);

/// Virtual time starts here.
pub(crate) const START: Nanos = Nanos::from_secs(1_000);

type Gate = LaunchGate<u32>;

/// Everything that takes part.
pub(crate) struct World {
    pub(crate) gpu: Rc<Gpu>,
    containers: Vec<Container>,
    processes: Vec<Process>,
    arbiter: Option<Arbiter>,
    /// State of the generator of wake-up delays.
    random: Cell<u64>,
    /// Longest delay of a wake-up.
    pub(crate) max_delay: Nanos,
}

/// What the processes of a container share.
struct Container {
    account: SharedAccount,
    window: ArbiterWindow,
    percent: u32,
}

/// The account in the container's file.
#[derive(Default)]
struct SharedAccount {
    charged: Nanos,
    pacer: Pacer,
    busy: Nanos,
}

struct Process {
    container: usize,
    program: Program,
    driver: SimulatedDriver,
    gate: &'static Gate,
    costs: CostTable,
    captures: Captures,
    controller: GpuController,
    threads: Vec<Thread>,
    demand: WindowDemand,
    /// True if the monitor thread was notified since its last round.
    is_notified: bool,
    monitor: Monitor,
    /// The process is stopped by a signal until then.
    stopped_until: Nanos,
}

/// What the monitor thread sleeps on, and when it wakes at the latest.
struct Monitor {
    sleep: Sleep,
    wakes_at: Nanos,
}

struct Thread {
    state: State,
    launches: u64,
    /// End of the thread's work that it has not waited for.
    end: Nanos,
    /// The longest time for which a launch was held back.
    longest_wait: Nanos,
}

enum State {
    /// Launches at this moment.
    Ready(Nanos),
    /// Sleeps until the gate opens.
    WaitsForOpen(BlockedLaunch<'static, u32>),
    /// Tries again at this moment.
    Retries(Nanos, BlockedLaunch<'static, u32>),
    /// Is in a call of the driver until this moment.
    InCall(Nanos, Launch<'static, u32>),
}

struct Arbiter {
    gpu: GpuArbiter<usize>,
    acts_at: Nanos,
}

#[derive(Clone, Copy)]
enum Actor {
    Thread(usize, usize),
    Monitor(usize),
    Arbiter,
}

impl World {
    pub(crate) fn new() -> Self {
        let gpu = Rc::new(Gpu::default());
        gpu.now.set(START);
        Self {
            gpu,
            containers: Vec::new(),
            processes: Vec::new(),
            arbiter: None,
            random: Cell::new(0x2545_f491_4f6c_dd1d),
            max_delay: Nanos::from_micros(60),
        }
    }

    /// Returns a world with one container that runs one program.
    pub(crate) fn with(program: Program, percent: u32) -> Self {
        let mut world = Self::new();
        let container = world.add_container(percent);
        world.add_process(container, program);
        world
    }

    pub(crate) fn now(&self) -> Nanos {
        self.gpu.now.get()
    }

    /// Adds a container with a share of the GPU; returns its number.
    pub(crate) fn add_container(&mut self, percent: u32) -> usize {
        let window = ArbiterWindow { change: 0, number: 0, deadline: Nanos::ZERO };
        self.containers.push(Container { account: SharedAccount::default(), window, percent });
        self.containers.len() - 1
    }

    /// Adds a process to a container; returns its number.
    pub(crate) fn add_process(&mut self, container: usize, program: Program) -> usize {
        self.gpu.overlaps.set(program.overlaps);
        let gate: &'static Gate = Box::leak(Box::default());
        let percent = self.containers[container].percent;
        gate.set_limit(percent, percent < 100);
        let now = self.now();
        let ready =
            |_| Thread { state: State::Ready(now), launches: 0, end: Nanos::ZERO, longest_wait: Nanos::ZERO };
        self.processes.push(Process {
            container,
            program,
            driver: SimulatedDriver::new(self.gpu.clone(), container),
            gate,
            costs: CostTable::default(),
            captures: Captures::default(),
            controller: GpuController::default(),
            threads: (0..program.threads).map(ready).collect(),
            demand: WindowDemand::default(),
            is_notified: false,
            monitor: Monitor { sleep: Sleep::UntilWork, wakes_at: now },
            stopped_until: Nanos::ZERO,
        });
        self.processes.len() - 1
    }

    /// Starts an arbiter for all containers.
    pub(crate) fn start_arbiter(&mut self) {
        let mut gpu = GpuArbiter::default();
        for (number, container) in self.containers.iter().enumerate() {
            gpu.set(number, share(container.percent));
        }
        self.arbiter = Some(Arbiter { gpu, acts_at: self.now() });
        self.notify_all();
    }

    /// Ends the arbiter.
    pub(crate) fn stop_arbiter(&mut self) {
        self.arbiter = None;
        // In the library the monitor thread notices the missing heartbeat when its sleep ends.
        self.notify_all();
        let now = self.now();
        self.processes.iter_mut().for_each(|process| process.monitor.wakes_at = now);
    }

    /// Changes the share of a container while its programs run.
    pub(crate) fn set_percent(&mut self, container: usize, percent: u32) {
        self.containers[container].percent = percent;
        for process in self.processes.iter().filter(|process| process.container == container) {
            process.gate.set_limit(percent, percent < 100);
        }
        if let Some(arbiter) = &mut self.arbiter {
            arbiter.gpu.set(container, share(percent));
        }
        self.notify_all();
    }

    /// Stops a process for a while, as a signal does. Its work on the GPU goes on.
    pub(crate) fn stop_process(&mut self, process: usize, time: Nanos) {
        let resumes = self.now() + time;
        let process = &mut self.processes[process];
        process.stopped_until = resumes;
        process.monitor.wakes_at = process.monitor.wakes_at.max(resumes);
        for thread in &mut process.threads {
            if let State::Ready(at) | State::Retries(at, _) | State::InCall(at, _) = &mut thread.state {
                *at = resumes.max(*at);
            }
        }
    }

    /// Sets the longest delay of a wake-up.
    pub(crate) fn with_delay(mut self, max_delay: Nanos) -> Self {
        self.max_delay = max_delay;
        self
    }

    /// Runs for a while.
    pub(crate) fn run(&mut self, time: Nanos) {
        let end = self.now() + time;
        while let Some((at, actor)) = self.next_actor().filter(|(at, _)| *at < end) {
            self.gpu.now.set(self.now().max(at));
            match actor {
                Actor::Thread(process, thread) => self.run_thread(process, thread),
                Actor::Monitor(process) => self.run_monitor(process),
                Actor::Arbiter => self.run_arbiter(),
            }
        }
        self.gpu.now.set(end);
    }

    /// Runs for a while; returns the percentage of that time in which kernels of the container ran.
    pub(crate) fn busy_percent(&mut self, container: usize, time: Nanos) -> f64 {
        let begin = self.now();
        self.run(time);
        self.gpu.busy(container, begin, begin + time).0 as f64 * 100.0 / time.0 as f64
    }

    /// Runs for a while; returns how many kernels of the container ended.
    pub(crate) fn kernels_in(&mut self, container: usize, time: Nanos) -> usize {
        let begin = self.now();
        self.run(time);
        self.gpu.completed(container, begin, begin + time)
    }

    /// Returns the launches of each thread of a process.
    pub(crate) fn launches(&self, process: usize) -> Vec<u64> {
        self.processes[process].threads.iter().map(|thread| thread.launches).collect()
    }

    /// Returns the longest time for which any launch was held back.
    pub(crate) fn longest_wait(&self) -> Nanos {
        let threads = self.processes.iter().flat_map(|process| &process.threads);
        threads.map(|thread| thread.longest_wait).max().unwrap_or_default()
    }

    /// Returns the busy time that was charged to a container.
    pub(crate) fn charged(&self, container: usize) -> Nanos {
        self.containers[container].account.busy
    }

    /// Returns what a process has reported to the arbiter.
    pub(crate) fn demand(&self, process: usize) -> WindowDemand {
        self.processes[process].demand
    }

    /// Returns the number of a process's threads that sleep though the gate is open.
    pub(crate) fn threads_asleep_at_an_open_gate(&self, process: usize) -> usize {
        let process = &self.processes[process];
        let threads = process.threads.iter().filter(|_| !process.gate.is_closed());
        threads.filter(|thread| matches!(thread.state, State::WaitsForOpen(_))).count()
    }

    fn next_actor(&self) -> Option<(Nanos, Actor)> {
        let threads = self.processes.iter().enumerate().flat_map(|(number, process)| {
            process.threads.iter().enumerate().filter_map(move |(index, thread)| {
                let at = match thread.state {
                    State::Ready(at) | State::Retries(at, _) | State::InCall(at, _) => at,
                    State::WaitsForOpen(_) => return None,
                };
                Some((at, Actor::Thread(number, index)))
            })
        });
        let monitors = self.processes.iter().enumerate();
        let monitors = monitors.map(|(number, process)| (process.monitor.wakes_at, Actor::Monitor(number)));
        let arbiter = self.arbiter.iter().map(|arbiter| (arbiter.acts_at, Actor::Arbiter));
        threads.chain(monitors).chain(arbiter).min_by_key(|(at, _)| *at)
    }

    /// Returns the moment at which a thread runs that is woken now.
    fn soon(&self) -> Nanos {
        let mut random = self.random.get();
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        self.random.set(random);
        self.now() + Nanos(random % (self.max_delay.0 + 1))
    }

    fn notify(&mut self, process: usize) {
        let soon = self.soon();
        let process = &mut self.processes[process];
        process.is_notified = true;
        // A thread that sleeps on the window does not hear of work.
        if !matches!(process.monitor.sleep, Sleep::UntilWindowChanges { .. }) {
            process.monitor.wakes_at = process.monitor.wakes_at.min(soon.max(process.stopped_until));
        }
    }

    fn notify_all(&mut self) {
        (0..self.processes.len()).for_each(|process| self.notify(process));
    }

    fn run_thread(&mut self, process: usize, thread: usize) {
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
                own.threads[thread].state = State::Ready(now + LAUNCH_TIME);
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

    fn run_monitor(&mut self, number: usize) {
        let now = self.now();
        let has_arbiter = self.arbiter.is_some();
        let process = &mut self.processes[number];
        process.is_notified = false;
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
                container.account.charge(charge.from, charge.to, charge.percent);
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

    fn run_arbiter(&mut self) {
        let now = self.now();
        let Some(mut arbiter) = self.arbiter.take() else { return };
        let actions = arbiter.gpu.step(now.0, |container| {
            let number = self.containers[container].window.number;
            let of_container = self.processes.iter().filter(|process| process.container == container);
            let wanting = of_container.filter(|process| process.demand.wants);
            let count = |number: usize| u32::try_from(number).unwrap();
            TenantReport {
                wanting: count(wanting.clone().count()),
                drained: count(wanting.filter(|process| process.demand.drained == number).count()),
                busy_ns: self.containers[container].account.busy.0,
            }
        });
        for action in actions {
            let (tenant, deadline, opened) = match action {
                WindowAction::Open { tenant, deadline } => (tenant, deadline, 1),
                WindowAction::SetDeadline { tenant, deadline } => (tenant, deadline, 0),
            };
            let window = &mut self.containers[tenant].window;
            window.change += 1;
            window.number += opened;
            window.deadline = Nanos(deadline);
            let change = window.change;
            for process in 0..self.processes.len() {
                let soon = self.soon();
                let process = &mut self.processes[process];
                let is_asleep = matches!(process.monitor.sleep,
                    Sleep::UntilWindowChanges { change: seen, .. } if seen != change);
                if process.container == tenant && is_asleep {
                    process.monitor.wakes_at = process.monitor.wakes_at.min(soon.max(process.stopped_until));
                }
            }
        }
        arbiter.acts_at =
            arbiter.gpu.next_step_at(now.0).map_or(Nanos::MAX, |at| Nanos(at).max(now + Nanos(1)));
        self.arbiter = Some(arbiter);
    }
}

impl Process {
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
        let Program { sync_every, pause, call, .. } = self.program;
        let own = &mut self.threads[thread];
        let end = self.driver.launch(stream, self.program.length(own.launches));
        own.end = own.end.max(end);
        own.launches += 1;
        let is_synced = sync_every > 0 && own.launches.is_multiple_of(sync_every);
        own.state = State::Ready(match call {
            Call::Blocking => end + LAUNCH_TIME,
            _ if is_synced => own.end + LAUNCH_TIME + pause,
            // A real driver blocks the caller when a thousand launches are queued.
            _ => (now + LAUNCH_TIME).max(end - self.program.kernel * 1_000),
        });
        end
    }
}

impl SharedAccount {
    /// Charges the part of a busy time that no other process has charged.
    fn charge(&mut self, from: Nanos, to: Nanos, percent: u32) {
        let from = from.max(self.charged);
        self.charged = self.charged.max(to);
        if from < to {
            self.busy += to - from;
            self.pacer.charge(from, to, percent);
        }
    }

    /// Clears debts.
    fn reset(&mut self, now: Nanos) {
        self.pacer = Pacer::at(self.pacer.opens_at().min(now));
    }
}

fn share(percent: u32) -> Share {
    Share { compute_percent: percent, compute_ceiling_percent: percent, by_throughput: false }
}
