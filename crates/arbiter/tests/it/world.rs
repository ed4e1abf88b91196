//! Honest and lying tenants of one GPU on virtual time. A lying tenant reports by a script; an honest one
//! reports what its kernels do.

use tessera_arbiter::{GpuArbiter, Share, TenantReport, WindowAction};

pub(crate) const MICROSECOND_NS: u64 = 1_000;
pub(crate) const MILLISECOND_NS: u64 = 1_000_000;
pub(crate) const SECOND_NS: u64 = 1_000_000_000;

/// Resolution of virtual time: the shortest interval between two steps of the arbiter.
const TICK_NS: u64 = 50 * MICROSECOND_NS;

/// Time for which a program that pauses still wants the GPU.
const SHORT_PAUSE_NS: u64 = MILLISECOND_NS;

/// Interval after which the arbiter polls without a wake-up.
const POLL_INTERVAL_NS: u64 = 10 * MILLISECOND_NS;

/// A tenant of the simulated GPU.
#[derive(Clone, Debug)]
pub(crate) enum Tenant {
    Honest(Program),
    Liar(Script),
}

/// A program that runs kernels of one length, one after the other, and may pause.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Program {
    pub(crate) kernel_ns: u64,
    /// Delay of messages to the program and from it.
    pub(crate) delay_ns: u64,
    /// Work after which the program pauses.
    pub(crate) burst_ns: u64,
    pub(crate) pause_ns: u64,
}

/// What a lying tenant reports, over and over.
#[derive(Clone, Debug)]
pub(crate) struct Script {
    pub(crate) lies: Vec<Lie>,
    /// True if the script begins again when a window opens.
    pub(crate) follows_windows: bool,
}

/// A report of a lying tenant and the time for which it stands.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Lie {
    pub(crate) wanting: u32,
    pub(crate) drained: u32,
    pub(crate) busy: BusyClaim,
    pub(crate) length_ns: u64,
    /// True if the tenant wakes the arbiter all the time, not only when the report changes.
    pub(crate) keeps_waking: bool,
}

/// The busy time that a lying tenant reports.
#[derive(Clone, Copy, Debug)]
pub(crate) enum BusyClaim {
    Constant(u64),
    /// The whole time so far.
    Always,
}

/// What a tenant got in a run.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Got {
    /// Time from the opening of its windows until they were returned or another one opened.
    pub(crate) open_ns: u64,
    /// Time in which its kernels ran. 0 for a lying tenant.
    pub(crate) busy_ns: u64,
    /// Time in which it wanted the GPU.
    pub(crate) wanted_ns: u64,
}

#[derive(Debug, Default)]
struct State {
    deadline: u64,
    /// True from the opening of a window until the arbiter sees it returned or opens another one.
    has_window: bool,
    /// Time at which an honest program learns of its window.
    notified_at: u64,
    /// End of the last kernel of an honest program.
    runs_until: u64,
    /// Work that an honest program has done since its last pause, and the end of its last pause.
    burst: (u64, u64),
    /// Position of a lying tenant in its script, and the end of its current report.
    lie: (usize, u64),
    report: TenantReport,
    got: Got,
}

pub(crate) fn hard(compute_percent: u32) -> Share {
    Share { compute_percent, compute_ceiling_percent: compute_percent, by_throughput: false }
}

pub(crate) fn soft(compute_percent: u32) -> Share {
    Share { compute_percent, compute_ceiling_percent: 100, by_throughput: false }
}

/// Returns a time as a percentage of a run.
pub(crate) fn percent(part_ns: u64, length_ns: u64) -> f64 {
    part_ns as f64 * 100.0 / length_ns as f64
}

/// Runs the tenants under an arbiter and returns what each got.
pub(crate) fn run(tenants: &[(Share, Tenant)], length_ns: u64) -> Vec<Got> {
    let mut arbiter = GpuArbiter::default();
    for (id, (share, _)) in tenants.iter().enumerate() {
        arbiter.set(id, *share);
    }
    let mut states: Vec<State> = tenants.iter().map(|_| State::default()).collect();
    let begin = 1_000 * SECOND_NS;
    let mut steps_at = begin;
    for now in (begin..begin + length_ns).step_by(usize::try_from(TICK_NS).unwrap()) {
        let mut is_woken = false;
        for ((_, tenant), state) in tenants.iter().zip(&mut states) {
            let report = tenant.report(state, now);
            is_woken |= tenant.keeps_waking(state) || report.wanting != state.report.wanting;
            is_woken |= report.drained != state.report.drained;
            state.report = report;
        }
        if is_woken || now >= steps_at {
            for state in &mut states {
                state.has_window &= state.report.drained < state.report.wanting;
            }
            for action in arbiter.step(now, |id: usize| states[id].report) {
                let WindowAction { tenant, is_new, deadline, .. } = action;
                if is_new {
                    states.iter_mut().for_each(|state| state.has_window = false);
                    let state = &mut states[tenant];
                    state.lie = tenants[tenant].1.lie_in_window(state, now);
                    (state.has_window, state.notified_at) = (true, now + tenants[tenant].1.delay_ns());
                }
                states[tenant].deadline = deadline;
            }
            steps_at = arbiter.next_step_at(now).unwrap_or(u64::MAX).min(now + POLL_INTERVAL_NS);
        }
        for ((_, tenant), state) in tenants.iter().zip(&mut states) {
            state.got.open_ns += if state.has_window { TICK_NS } else { 0 };
            state.got.wanted_ns += if state.report.wanting > 0 { TICK_NS } else { 0 };
            tenant.launch(state, now);
        }
    }
    states.iter().map(|state| state.got).collect()
}

impl Tenant {
    fn delay_ns(&self) -> u64 {
        if let Self::Honest(program) = self { program.delay_ns } else { 0 }
    }

    /// Returns what the tenant reports at `now`.
    fn report(&self, state: &mut State, now: u64) -> TenantReport {
        match self {
            Self::Honest(program) => {
                let has_drained = state.deadline <= now && state.runs_until + program.delay_ns <= now;
                let wanting = u32::from(state.burst.1 <= now || state.runs_until + SHORT_PAUSE_NS > now);
                TenantReport {
                    wanting,
                    drained: u32::from(has_drained) * wanting,
                    busy_ns: state.got.busy_ns - state.runs_until.saturating_sub(now),
                }
            }
            Self::Liar(script) => {
                let (place, end) = &mut state.lie;
                while *end <= now {
                    *place = (*place + 1) % script.lies.len();
                    *end = (*end).max(now) + script.lies[*place].length_ns;
                }
                let lie = script.lies[*place];
                let busy_ns = match lie.busy {
                    BusyClaim::Constant(busy_ns) => busy_ns,
                    BusyClaim::Always => now,
                };
                TenantReport { wanting: lie.wanting, drained: lie.drained, busy_ns }
            }
        }
    }

    /// Returns whether the tenant wakes the arbiter at this moment although its report has not changed.
    fn keeps_waking(&self, state: &State) -> bool {
        matches!(self, Self::Liar(script) if script.lies[state.lie.0].keeps_waking)
    }

    /// Returns the place in the script after a window has opened, and the end of the report there.
    fn lie_in_window(&self, state: &State, now: u64) -> (usize, u64) {
        match self {
            Self::Liar(script) if script.follows_windows => (0, now + script.lies[0].length_ns),
            _ => state.lie,
        }
    }

    /// Launches the kernels that begin in this tick. They run to their end.
    fn launch(&self, state: &mut State, now: u64) {
        let Self::Honest(program) = self else { return };
        let is_open = state.notified_at <= now && state.deadline > now;
        while is_open && state.burst.1 <= now && state.runs_until < now + TICK_NS {
            state.runs_until = state.runs_until.max(now) + program.kernel_ns;
            state.got.busy_ns += program.kernel_ns;
            state.burst.0 += program.kernel_ns;
            if state.burst.0 >= program.burst_ns {
                state.burst = (0, state.runs_until + program.pause_ns);
            }
        }
    }
}
