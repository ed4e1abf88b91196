//! Containers, their processes and an arbiter around the simulated GPU. One actor runs at a time, the
//! earliest one first.

mod arbiter;
mod container;
mod process;

use std::cell::Cell;
use std::rc::Rc;

use tessera_arbiter::GpuArbiter;
use tessera_throttle::Nanos;
use tessera_throttle::controller::{Sleep, WindowDemand};

use crate::gpu::Gpu;
use crate::programs::Program;
use arbiter::Arbiter;
use container::Container;
use process::Process;

/// Virtual time starts here.
pub(crate) const START: Nanos = Nanos::from_secs(1_000);

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

    /// Adds a container with a hard share of the GPU; returns its number.
    pub(crate) fn add_container(&mut self, percent: u32) -> usize {
        self.containers.push(Container::new(percent, percent));
        self.containers.len() - 1
    }

    /// Adds a container with a soft share, which may use all time that others leave; returns its number.
    pub(crate) fn add_soft_container(&mut self, percent: u32) -> usize {
        self.containers.push(Container::new(percent, 100));
        self.containers.len() - 1
    }

    /// Adds a process to a container; returns its number.
    pub(crate) fn add_process(&mut self, container: usize, program: Program) -> usize {
        self.gpu.overlaps.set(program.overlaps);
        let process = Process::new(container, program, self.gpu.clone());
        self.containers[container].limit(process.gate);
        self.processes.push(process);
        self.processes.len() - 1
    }

    /// Starts an arbiter for all containers.
    pub(crate) fn start_arbiter(&mut self) {
        let mut gpu = GpuArbiter::default();
        for (number, container) in self.containers.iter().enumerate() {
            gpu.set(number, container.share());
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
        let now = self.now();
        (self.containers[container].percent, self.containers[container].ceiling) = (percent, percent);
        for process in self.processes.iter().filter(|process| process.container == container) {
            self.containers[container].limit(process.gate);
        }
        if let Some(arbiter) = &mut self.arbiter {
            arbiter.gpu.set(container, self.containers[container].share());
            // The arbiter reads the limits at every step, and steps at least this often.
            arbiter.acts_at = arbiter.acts_at.min(now + Nanos::from_millis(10));
        }
        self.notify_all();
    }

    /// Stops a process for a while, as a signal does. Its work on the GPU goes on.
    pub(crate) fn stop_process(&mut self, process: usize, time: Nanos) {
        let resumes = self.now() + time;
        self.processes[process].stop_until(resumes);
    }

    /// Tells the arbiter whether all processes of a container are stopped.
    pub(crate) fn report_stopped(&mut self, container: usize, is_stopped: bool) {
        if let Some(arbiter) = &mut self.arbiter {
            arbiter.gpu.set_stopped(container, is_stopped);
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
        let before = self.gpu.work(container).busy;
        self.run(time);
        (self.gpu.work(container).busy - before).0 as f64 * 100.0 / time.0 as f64
    }

    /// Runs for a while; returns how many kernels of the container ended.
    pub(crate) fn kernels_in(&mut self, container: usize, time: Nanos) -> u64 {
        let before = self.gpu.work(container).completed;
        self.run(time);
        self.gpu.work(container).completed - before
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
        self.processes[process].threads_asleep_at_an_open_gate()
    }

    fn next_actor(&self) -> Option<(Nanos, Actor)> {
        let threads = self.processes.iter().enumerate().flat_map(|(number, process)| {
            let threads = process.threads.iter().enumerate();
            threads.filter_map(move |(index, thread)| Some((thread.runs_at()?, Actor::Thread(number, index))))
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
        // A thread that sleeps on the window does not hear of work.
        if !matches!(process.monitor.sleep, Sleep::UntilWindowChanges { .. }) {
            process.wake_monitor(soon);
        }
    }

    fn notify_all(&mut self) {
        (0..self.processes.len()).for_each(|process| self.notify(process));
    }
}
