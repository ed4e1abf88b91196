//! The arbiter of the GPU, when there is one.

use tessera_arbiter::{GpuArbiter, TenantReport, WindowAction};
use tessera_throttle::Nanos;
use tessera_throttle::controller::Sleep;

use super::World;

pub(super) struct Arbiter {
    pub(super) gpu: GpuArbiter<usize>,
    pub(super) acts_at: Nanos,
}

impl World {
    pub(super) fn run_arbiter(&mut self) {
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
            let WindowAction { tenant, is_new, deadline, queue_limit_ns } = action;
            let window = &mut self.containers[tenant].window;
            window.change += 1;
            window.number += u32::from(is_new);
            (window.deadline, window.queue_limit) = (Nanos(deadline), Nanos(queue_limit_ns));
            let change = window.change;
            for process in 0..self.processes.len() {
                let soon = self.soon();
                let process = &mut self.processes[process];
                let is_asleep = matches!(process.monitor.sleep,
                    Sleep::UntilWindowChanges { change: seen, .. } if seen != change);
                if process.container == tenant && is_asleep {
                    process.wake_monitor(soon);
                }
            }
        }
        arbiter.acts_at =
            arbiter.gpu.next_step_at(now.0).map_or(Nanos::MAX, |at| Nanos(at).max(now + Nanos(1)));
        self.arbiter = Some(arbiter);
    }
}
