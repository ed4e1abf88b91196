//! The decisions of the monitor thread for one GPU: it follows the fences, charges busy time, opens and
//! closes the launch gate, and decides how long it may sleep.
//!
//! A round is three calls: [`GpuController::set_rule`], then [`GpuController::follow`] while the gate is
//! busy, then [`GpuController::follow_window`] under an arbiter, or [`GpuController::follow_account`]
//! without one. Each takes the time as an argument and returns what the caller has to do.

use crate::back_pressure::{DEEP_QUEUE_LIMIT, MAX_HOLD, QUEUE_LIMIT, QueueLimit};
use crate::busy_time::BusyTime;
use crate::captures::Captures;
use crate::costs::CostTable;
use crate::driver::Driver;
use crate::fences;
use crate::gate::LaunchGate;
use crate::nanos::Nanos;
use crate::pacer::Pacer;

/// Interval between two polls of the driver while many launches arrive. A full queue has not all ended by then.
const STEADY_POLL_INTERVAL: Nanos = QUEUE_LIMIT.times(2).over(3);

/// Shortest interval between two polls of the driver while launches arrive, and longest one while the end
/// of work is overdue or the gate is closed.
const POLL_INTERVAL: Nanos = Nanos::from_micros(500);

/// Shortest sleep of the monitor thread: a shorter one is not worth the system call.
const MIN_SLEEP: Nanos = Nanos::from_micros(40);

/// Longest sleep beside a closed gate, because the limits may change or the arbiter may be gone.
const MAX_CLOSED_SLEEP: Nanos = Nanos::from_millis(100);

/// Busy time that other processes of the container may charge while the gate of an idle one is closed: their
/// queued work ends in less, unless it is stuck.
const MAX_DRAIN: Nanos = MAX_HOLD.times(4);

/// Shortest sleep until the account lets the gate open.
const MIN_CLOSED_SLEEP: Nanos = Nanos::from_micros(1);

/// A process keeps its window in a pause shorter than this: no other tenant could use it.
const SHORT_PAUSE: Nanos = Nanos::from_millis(1);

/// A process keeps its window in a pause shorter than this even if the program is expected to pause for long.
const BRIEF_PAUSE: Nanos = Nanos::from_micros(100);

/// Busy time over which the pace of work is measured.
const PACE_SAMPLE: Nanos = Nanos::from_millis(10);

/// Upper bound of the estimated work that ends in [`PACE_SAMPLE`], however wrong the estimates are.
const MAX_PACE: Nanos = PACE_SAMPLE.times(64);

/// Launches between two polls up to which the flow counts as sparse.
const MAX_SPARSE_LAUNCHES: u64 = 4;

/// The state of one GPU in the monitor thread.
#[derive(Debug, Default)]
pub struct GpuController {
    pacer: Pacer,
    /// The rule of the last round, or `None` before the first one.
    rule: Option<LimitRule>,
    /// Moment up to which busy time is charged, or `None` while the GPU is idle for this process.
    charged_until: Option<Nanos>,
    /// Estimated time that the work queued at that moment takes.
    remaining: Nanos,
    busy_time: BusyTime,
    /// Moment at which the last work had ended.
    idle_since: Nanos,
    /// Begin of the current pause, unless other tenants can use it.
    paused_since: Option<Nanos>,
    /// True if the last pause was long: then the next one is expected to be long, too, and other tenants can
    /// use it from its beginning.
    expects_long_pause: bool,
    /// Moment at which a fence was last reached.
    progressed: Nanos,
    /// Moment at which the account last closed the gate, or at which the rule came into force.
    closed: Nanos,
    /// True if the shared account has run away: the next round clears it.
    has_runaway_account: bool,
    /// Launches seen by the last poll: a stream with new launches needs no fence yet.
    launches: u64,
    /// Estimated work that ends in [`PACE_SAMPLE`] of busy time. 0 before the first measurement.
    pace: Nanos,
    pace_sample: PaceSample,
    /// Real time in which the queued work may end.
    queue_limit: Nanos,
    flow: Flow,
    /// The last report to the arbiter.
    reported: WindowDemand,
    /// The change number of a window that was returned before its end. It is not used again until the
    /// arbiter has changed it.
    returned_window: Option<u32>,
}

/// The rule by which a gate opens and closes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LimitRule {
    /// Percentage of the GPU's time.
    pub percent: u32,
    /// True if an arbiter hands out windows.
    pub has_arbiter: bool,
}

/// The rule of a GPU without a limit.
const UNLIMITED: LimitRule = LimitRule { percent: 100, has_arbiter: false };

/// The arbiter's window as the process sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArbiterWindow {
    /// Counts changes of the window.
    pub change: u32,
    /// Counts windows.
    pub number: u32,
    /// The moment at which the window closes or has closed.
    pub deadline: Nanos,
    /// Work, in real time, that the process may have queued. 0 stands for [`QUEUE_LIMIT`]: an arbiter of an earlier
    /// version does not write it.
    pub queue_limit: Nanos,
}

/// What a process reports to the arbiter about one GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WindowDemand {
    /// True if the process has work that runs or waits.
    pub wants: bool,
    /// Number of the last window whose work has all ended.
    pub drained: u32,
}

/// Busy time to charge to the account that the processes of a container share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Charge {
    /// Begin of the stretch of time that is charged for.
    pub from: Nanos,
    /// End of that stretch.
    pub to: Nanos,
    /// Time in it for which the GPU was busy.
    pub busy: Nanos,
    /// The share it is charged at.
    pub percent: u32,
}

/// What the caller does after a round, in this order.
#[must_use]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RoundDecision {
    /// True if threads that sleep on the gate's word must be woken.
    pub wake_blocked: bool,
    /// News for the arbiter.
    pub report: Option<WindowDemand>,
    /// How long the monitor thread may sleep.
    pub sleep: Sleep,
}

/// How long the monitor thread may sleep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sleep {
    /// Until it is notified of work.
    UntilWork,
    /// For this time, or until it is notified of work.
    For(Nanos),
    /// Until the arbiter changes the window, or for a time. It does not hear of work meanwhile.
    UntilWindowChanges {
        /// The change number that was seen.
        change: u32,
        /// The longest sleep.
        timeout: Nanos,
    },
}

/// How launches arrive.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Flow {
    #[default]
    Steady,
    /// A few since the last poll, or the first ones after a pause.
    Sparse,
    /// None since the last poll: this may be the end.
    Stopped,
}

/// Estimated work that has ended, and the busy time in which it ended.
#[derive(Debug, Default)]
struct PaceSample {
    ended: Nanos,
    busy: Nanos,
}

impl Flow {
    fn from_launches(launches: u64) -> Self {
        match launches {
            0 => Self::Stopped,
            1..=MAX_SPARSE_LAUNCHES => Self::Sparse,
            _ => Self::Steady,
        }
    }
}

impl Sleep {
    /// Returns the shorter of two sleeps, for a process with several GPUs. The thread can sleep on one
    /// word only, so it does not wait for a window: it would not hear of work on the other GPU.
    #[must_use]
    pub fn shorter(self, other: Self) -> Self {
        match (self, other) {
            (Self::UntilWork, Self::UntilWork) => Self::UntilWork,
            _ => Self::For(self.longest().min(other.longest())),
        }
    }

    /// Returns the longest sleep of a thread that hears only of work.
    fn longest(self) -> Nanos {
        match self {
            Self::UntilWork => Nanos::MAX,
            Self::For(time) => time,
            Self::UntilWindowChanges { timeout, .. } => timeout.min(POLL_INTERVAL),
        }
    }
}

impl GpuController {
    /// Returns true if this GPU needs a round: it is limited, its gate was never opened, or the arbiter
    /// believes that this process wants it.
    #[must_use]
    pub fn needs_round<E>(&self, gate: &LaunchGate<E>) -> bool {
        gate.is_limited() || !gate.is_open() || self.reported.wants
    }

    /// Records that the GPU has no limit and got no round.
    pub fn skip_round(&mut self) {
        self.rule = Some(UNLIMITED);
    }

    /// Starts a round under a rule. Returns true if the rule has changed or the shared account has run away:
    /// then debts are cleared, and the caller clears those of the shared account too.
    ///
    /// Time used under another rule is not owed under this one: neither time without a limit, nor time
    /// that an arbiter let this process make good. The first round of a process is no change: a process
    /// that has just started alters nothing for the others.
    #[must_use]
    pub fn set_rule<E>(&mut self, now: Nanos, rule: LimitRule, gate: &LaunchGate<E>) -> bool {
        let before = self.rule.replace(rule);
        if before != Some(rule) {
            self.closed = now;
        }
        let has_changed = before.is_some_and(|before| before != rule);
        let clears_debts = std::mem::take(&mut self.has_runaway_account) || has_changed;
        if clears_debts {
            self.pacer = Pacer::default();
            gate.set_busy_since(now);
            self.charged_until = self.charged_until.map(|_| now);
        }
        clears_debts
    }

    /// Polls the fences, charges busy time up to `now`, and notices when all work has ended. The caller
    /// applies the returned charge to the shared account.
    pub fn follow<D: Driver>(
        &mut self,
        now: Nanos,
        driver: &D,
        gate: &LaunchGate<D::DriverEvent>,
        costs: &CostTable,
        captures: &Captures,
    ) -> Option<Charge> {
        let percent = self.rule.unwrap_or(UNLIMITED).percent;
        // In every round: it costs next to nothing, and must not happen before there is work. A program
        // that only watches the GPU has no driver.
        let _ = driver.relax();
        let polling = gate.lock_polling();
        let queries = gate.lock_queues().queries();
        let reached = fences::poll_all(driver, &queries);
        let mut queues = gate.lock_queues();
        let ended = queues.pass(&reached, costs);
        self.flow = Flow::from_launches(queues.launches.saturating_sub(self.launches));
        // No event is recorded beside a capture, which it might get into. Work that was launched before
        // counts as ended when its estimated time is over.
        let may_record = !captures.is_running();
        let should_have_ended = now >= self.charged_until.unwrap_or_default() + self.remaining;
        if self.flow == Flow::Stopped && (may_record || should_have_ended) {
            // Work without a fence gets one, or its end would not be seen.
            queues.fence_all(driver, may_record);
        }
        self.launches = queues.launches;
        // A program that is slower than the GPU leaves it idle between any two launches. It would have to announce
        // each launch if such a moment counted.
        let is_empty = self.flow == Flow::Stopped && queues.are_empty() && gate.mark_idle();
        let is_in_call = gate.has_launches_in_flight() && self.flow == Flow::Stopped;
        let is_always_busy = self.busy_time.was_always_busy(
            queues.oldest_fence(),
            queues.fence_number,
            is_in_call || gate.is_open() && gate.has_blocked_launches(),
        );
        let runs_since = queues.oldest_launch().unwrap_or(now);
        drop(queues);
        drop(polling);

        let charged_until = match self.charged_until {
            Some(until) => until,
            // A launch came to the gate and waits there.
            None if is_empty && self.flow == Flow::Stopped => return None,
            None => self.begin_work(now, gate),
        };
        // The monitor thread polls far more often than this, unless the process was stopped by a signal.
        // That time was not the process's own.
        let was_stopped = now - charged_until > MAX_HOLD;
        let until = if was_stopped { now.min(charged_until + self.remaining) } else { now };
        let queued = self.queue_time(gate);
        self.remaining = if until < now { Nanos::ZERO } else { queued };
        let from = charged_until - self.busy_time.idle();
        let begun = queued.min(now - runs_since);
        let busy = self.busy_time.measure(until - charged_until, ended, begun, is_always_busy);
        self.pacer.charge(until - busy, until, percent);
        self.measure_pace(gate, ended, busy);
        self.charged_until = Some(if was_stopped { now } else { until });
        if is_empty {
            (self.charged_until, self.idle_since, self.paused_since) = (None, until, Some(until));
        }
        if ended > Nanos::ZERO || is_empty {
            self.progressed = now;
        }
        Some(Charge { from, to: until, busy, percent })
    }

    /// Returns the moment from which new work is charged. Work whose launch has not said since when it runs is
    /// still on its way.
    fn begin_work<E>(&mut self, now: Nanos, gate: &LaunchGate<E>) -> Nanos {
        let began = gate.busy_since().map_or(now, |since| since.min(now));
        (self.progressed, self.flow) = (began, Flow::Sparse);
        began
    }

    /// Opens and closes the gate by the arbiter's window, which the caller has read before `now`.
    pub fn follow_window<E>(
        &mut self,
        now: Nanos,
        window: ArbiterWindow,
        gate: &LaunchGate<E>,
    ) -> RoundDecision {
        let ArbiterWindow { change, number, deadline, queue_limit } = window;
        // What is queued at the end of the window delays the next tenant.
        self.set_queue_limit(gate, queue_limit.min(deadline - now));
        let mut is_open = deadline > now && self.returned_window != Some(change);
        // The gate is closed before demand is read; see `LaunchGate::try_enter`.
        let mut wake_blocked = gate.set_open(is_open);
        let patience = if self.expects_long_pause { BRIEF_PAUSE } else { SHORT_PAUSE };
        let is_short_pause = self.idle_since > Nanos::ZERO && now - self.idle_since < patience;
        let (mut is_busy, mut wants) = demand(gate);
        if wants {
            self.learn_from_pause(now);
        } else if is_short_pause && !is_open {
            // Other tenants can use this pause, and the thread does not hear of its end.
            self.paused_since = None;
        }
        if is_open && !wants && !is_short_pause {
            // Another tenant gets the GPU as soon as the window is returned. A launch that comes from now
            // on waits for the next window.
            let _ = gate.set_open(false);
            (is_busy, wants) = demand(gate);
            is_open = wants;
            wake_blocked = gate.set_open(is_open);
            self.returned_window = (!is_open).then_some(change);
        }
        let wants = wants || is_short_pause;
        let drained = match (is_open || is_busy, self.reported.drained) {
            (false, _) => number,
            // The window was returned, and is ours again.
            (true, drained) if drained == number => number.wrapping_sub(1),
            (true, drained) => drained,
        };
        let report = self.report(WindowDemand { wants, drained });
        let until_change = |timeout| Sleep::UntilWindowChanges { change, timeout };
        let sleep = match (is_open, is_busy, wants) {
            (true, true, _) => until_change(self.until_news(now, gate).min(deadline - now)),
            (false, true, _) => Sleep::For(self.until_drained(now, gate)),
            (true, false, _) => Sleep::For(patience),
            // A pause that has become long is reported.
            (false, false, true) if is_short_pause => until_change(patience),
            // The arbiter may be gone, so the sleep is bounded.
            (false, false, true) => until_change(MAX_CLOSED_SLEEP),
            (false, false, false) => Sleep::UntilWork,
        };
        RoundDecision { wake_blocked, report, sleep }
    }

    /// Learns from the pause that ends now how long the next one may be. A brief pause says nothing: there
    /// are many of them between two long ones.
    fn learn_from_pause(&mut self, now: Nanos) {
        let paused = self.paused_since.take().map_or(Nanos::ZERO, |since| now - since);
        if paused >= BRIEF_PAUSE {
            self.expects_long_pause = paused >= SHORT_PAUSE;
        }
    }

    /// Opens and closes the gate by the process's own account and by `shared`, the account of all
    /// processes of the container.
    pub fn follow_account<E>(&mut self, now: Nanos, shared: Pacer, gate: &LaunchGate<E>) -> RoundDecision {
        let percent = self.rule.unwrap_or(UNLIMITED).percent;
        self.set_queue_limit(gate, DEEP_QUEUE_LIMIT);
        // The next arbiter must not wait for work that has ended by then.
        let report = self.report(WindowDemand { wants: false, ..self.reported });
        let was_open = gate.is_open();
        let is_spent = self.pacer.is_spent(now, percent) || shared.is_spent(now, percent);
        let opens_at = self.pacer.opens_at().max(shared.opens_at());
        // Work that depends on a launch which is blocked at the gate would be charged for ever.
        let is_stuck = gate.is_busy() && now > self.progressed.max(self.closed) + MAX_HOLD;
        let has_run_away = !was_open && now < opens_at && self.has_run_away(now, percent, gate);
        let mut wake_blocked = false;
        // A launch that waits for room in the queue passes after the longest hold, if the gate is open till then.
        let must_stay_open = is_stuck && gate.has_blocked_launches();
        if was_open && is_spent && !must_stay_open {
            let _ = gate.set_open(false);
            self.closed = now;
        } else if !was_open && (percent >= 100 || now >= opens_at || is_stuck || has_run_away) {
            wake_blocked = gate.set_open(true);
            self.has_runaway_account = has_run_away;
        }
        // Another process may have charged more by then, or the limits may have changed.
        let reopens = (opens_at - now).clamp(MIN_CLOSED_SLEEP, MAX_CLOSED_SLEEP);
        let sleep = match (gate.is_busy(), gate.is_open()) {
            (true, true) => Sleep::For(self.until_news(now, gate)),
            (true, false) => Sleep::For(reopens.min(POLL_INTERVAL)),
            (false, false) => Sleep::For(reopens),
            (false, true) => Sleep::UntilWork,
        };
        RoundDecision { wake_blocked, report, sleep }
    }

    /// Returns true if launches wait at the closed gate for an account that may never be paid for: another
    /// process's gate opens again and again because its work is stuck, and that work is charged all the time.
    /// This process has no work that could be stuck. What it owes itself is always waited for.
    fn has_run_away<E>(&self, now: Nanos, percent: u32, gate: &LaunchGate<E>) -> bool {
        let longest = MAX_DRAIN * 100 / u64::from(percent.max(1));
        let is_idle = !gate.is_busy() && gate.has_blocked_launches();
        is_idle && now > self.pacer.opens_at().max(self.closed) + longest
    }

    /// Returns what the arbiter does not know yet.
    fn report(&mut self, demand: WindowDemand) -> Option<WindowDemand> {
        let is_news = demand != self.reported;
        self.reported = demand;
        is_news.then_some(demand)
    }

    /// Returns how long not to poll while work runs and more may come.
    fn until_news<E>(&self, now: Nanos, gate: &LaunchGate<E>) -> Nanos {
        if gate.has_blocked_launches() {
            // A blocked launch waits for room in the queue, and polls for that by itself.
            return self.queue_time(gate).clamp(POLL_INTERVAL, STEADY_POLL_INTERVAL);
        }
        match self.flow {
            // All work may end at any time, and other tenants wait for that.
            Flow::Steady | Flow::Sparse if self.expects_long_pause => {
                (self.queue_time(gate) / 2).clamp(BRIEF_PAUSE, STEADY_POLL_INTERVAL)
            }
            Flow::Steady => STEADY_POLL_INTERVAL,
            Flow::Sparse => self.queue_time(gate).clamp(POLL_INTERVAL, STEADY_POLL_INTERVAL),
            Flow::Stopped => self.until_drained(now, gate),
        }
    }

    /// Returns how long not to poll while the queue drains: half of the estimated rest, and then longer
    /// each time, because the estimate was wrong. The end must be seen soon: until then no other tenant
    /// gets the GPU.
    fn until_drained<E>(&self, now: Nanos, gate: &LaunchGate<E>) -> Nanos {
        let (expected, passed) = (self.queue_time(gate), now - self.progressed);
        match expected.checked_sub(passed) {
            Some(left) => (left / 2).clamp(MIN_SLEEP, (left / 8).max(QUEUE_LIMIT / 2)),
            None => ((passed - expected) / 8).clamp(MIN_SLEEP, POLL_INTERVAL),
        }
    }

    /// Returns how long the queued work takes, by its estimate and by the pace at which work ends.
    fn queue_time<E>(&self, gate: &LaunchGate<E>) -> Nanos {
        gate.queued().min(MAX_PACE).scaled(PACE_SAMPLE, self.pace.max(PACE_SAMPLE))
    }

    /// Learns how much estimated work ends in a stretch of busy time.
    fn measure_pace<E>(&mut self, gate: &LaunchGate<E>, ended: Nanos, busy: Nanos) {
        let sample = &mut self.pace_sample;
        sample.ended += ended;
        sample.busy += busy;
        if sample.busy >= PACE_SAMPLE {
            let pace = sample.ended.scaled(PACE_SAMPLE, sample.busy).clamp(PACE_SAMPLE, MAX_PACE);
            self.pace = self.pace.max(PACE_SAMPLE).midpoint(pace);
            self.pace_sample = PaceSample::default();
            self.set_queue_limit(gate, self.queue_limit);
        }
    }

    /// Bounds the queue, so that it takes about `time` of real time, but at least [`QUEUE_LIMIT`].
    fn set_queue_limit<E>(&mut self, gate: &LaunchGate<E>, time: Nanos) {
        let time = time.clamp(QUEUE_LIMIT, DEEP_QUEUE_LIMIT);
        self.queue_limit = time;
        gate.set_queue_limit(QueueLimit { work: time.scaled(self.pace.max(PACE_SAMPLE), PACE_SAMPLE), time });
    }
}

/// Returns whether work of this process is at the GPU or on its way, and whether any is wanted there.
fn demand<E>(gate: &LaunchGate<E>) -> (bool, bool) {
    let is_busy = gate.is_busy();
    (is_busy, is_busy || gate.has_blocked_launches())
}
