//! Rounds of the monitor thread. Each round reads limits and windows, lets the limiter decide, and
//! carries out the decision.

use std::sync::atomic::Ordering;

use tessera_limits::control::WindowState;
use tessera_limits::{GpuSlot, PerGpu, futex};
use tessera_throttle::Nanos;
use tessera_throttle::controller::{ArbiterWindow, GpuController, LimitRule, RoundDecision, Sleep};

use super::driver::CudaDriver;
use super::{Gate, now};
use crate::grant::{GpuPlace, Process};

/// The controllers of all GPUs.
#[derive(Default)]
pub struct Controllers {
    gpus: PerGpu<GpuController>,
}

impl Controllers {
    /// Runs a round for each GPU that needs one. Returns how long the monitor thread may sleep. If
    /// the thread must wait for a window, the returned slot names the GPU of that window.
    pub fn run_round(&mut self, process: &Process) -> (GpuSlot, Sleep) {
        let gpus = GpuSlot::all().zip(process.compute.gates.iter().zip(self.gpus.iter_mut()));
        let sleeps = gpus.filter_map(|(gpu, (gate, controller))| {
            if controller.needs_round(gate) {
                return Some((gpu, run_round(process, gpu, gate, controller)));
            }
            controller.skip_round();
            None
        });
        let shortest = sleeps.reduce(|(gpu, sleep), (_, other)| (gpu, sleep.shorter(other)));
        shortest.unwrap_or((GpuSlot::FIRST, Sleep::UntilWork))
    }
}

fn run_round(process: &Process, gpu: GpuSlot, gate: &Gate, controller: &mut GpuController) -> Sleep {
    let began = now();
    let GpuPlace { grant, gpu: place } = process.place(gpu);
    let shared = grant.account.pacer(*place);
    let has_arbiter = gate.is_limited() && grant.control.has_arbiter(began.0);
    if controller.set_rule(began, LimitRule { percent: gate.percent(), has_arbiter }, gate) {
        shared.reset(began);
    }
    if gate.is_busy() {
        let compute = &process.compute;
        let charge = controller.follow(began, &CudaDriver, gate, &compute.costs, &compute.captures);
        if let Some(charge) = charge {
            shared.charge(charge);
        }
    }
    // The driver may have blocked this thread, so the decision needs a new reading of the clock.
    let decision = if has_arbiter {
        let WindowState { change, number, deadline, queue_limit } = grant.control.window(*place).read();
        let (deadline, queue_limit) = (Nanos(deadline), Nanos(queue_limit));
        let window = ArbiterWindow { change, number, deadline, queue_limit };
        controller.follow_window(now(), window, gate)
    } else {
        controller.follow_account(now(), shared.read(), gate)
    };
    carry_out(process, gpu, gate, decision)
}

fn carry_out(process: &Process, gpu: GpuSlot, gate: &Gate, decision: RoundDecision) -> Sleep {
    if decision.wake_blocked {
        futex::wake(gate.open_word());
    }
    if let Some(demand) = decision.report {
        let GpuPlace { grant, gpu } = process.place(gpu);
        let reported = &grant.slot().demand[*gpu];
        reported.drained.store(demand.drained, Ordering::Release);
        reported.wants.store(u32::from(demand.wants), Ordering::Release);
        grant.wake_arbiter();
    }
    decision.sleep
}
