//! Follows what runs, charges the time, opens and closes the gates. Runs on our own thread.

use std::sync::atomic::Ordering;

use tessera_limits::control::WindowState;
use tessera_limits::pacer::{Pacer, SharedPacer};
use tessera_limits::queue::{HOLD, QUEUE};
use tessera_limits::{GpuSlot, PerGpu, futex};

use super::fences;
use super::gate::Gate;
use crate::grant::Process;

/// How often work is looked at while more of it comes,
const SLOW_TICK: u64 = QUEUE * 2 / 3;

/// and at most.
const TICK: u64 = 500_000;

/// Less than this it is not worth to sleep.
const SHORTEST_REST: u64 = 40_000;

/// How long a closed gate is left alone at most.
const LONGEST_REST: u64 = 100_000_000;

/// A pause shorter than this counts as work: the GPU waits for the program, and nobody else can use such a pause.
const GAP: u64 = 1_000_000;

/// Over how much busy time the pace of work is learned.
const PACE: u64 = 10_000_000;

/// However wrong estimates are, no more of them is queued.
const MOST_QUEUED: u64 = 64 * QUEUE;

/// What is known of each GPU's work.
#[derive(Default)]
pub struct Controller {
    gpus: PerGpu<State>,
}

#[derive(Default)]
struct State {
    pacer: Pacer,
    /// As it was at the last look; none before the first.
    rule: Option<Rule>,
    /// Until when busy time is charged; 0 when the GPU is idle for us.
    charged: u64,
    /// How long what was queued then takes, by estimate.
    left: u64,
    /// When the last work had ended.
    idle_since: u64,
    /// When a fence was last reached.
    progressed: u64,
    /// When the gate was last closed by our own account.
    closed: u64,
    /// Launches seen at the last look: a stream that is fed needs no fence yet.
    launches: u64,
    /// Work that has ended, by estimate, in how much busy time.
    pace: (u64, u64),
    flow: Flow,
    /// What the arbiter was told last: whether we want the GPU, and the number of the window we have drained.
    told: (bool, u32),
    /// A window that was not needed to its end: it is not used again until the arbiter has changed it.
    given_back: Option<u32>,
}

/// By what a GPU is opened and closed.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Rule {
    percent: u32,
    /// Whether an arbiter hands out windows.
    is_led: bool,
}

/// Where nothing is held back.
const FREE: Rule = Rule { percent: 100, is_led: false };

/// How launches come.
#[derive(Clone, Copy, Debug, Default)]
enum Flow {
    #[default]
    Steady,
    /// A few since the last look, or the first after a while.
    Sparse,
    /// None since the last look: this may be the end.
    Still,
}

impl Flow {
    fn of(launches: u64) -> Self {
        match launches {
            0 => Self::Still,
            1..=4 => Self::Sparse,
            _ => Self::Steady,
        }
    }
}

/// How long there is nothing to look at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rest {
    /// Until there is work.
    Idle,
    /// So many nanoseconds, or until there is work.
    For(u64),
    /// The same, or until the arbiter changes the window of this GPU from what it was: work is not heard of meanwhile.
    Window(GpuSlot, u32, u64),
}

impl Controller {
    /// Looks at all GPUs.
    pub fn look(&mut self, process: &Process) -> Rest {
        let gates = GpuSlot::all().zip(process.compute.gates.iter().zip(self.gpus.iter_mut()));
        let rests = gates.filter_map(|(gpu, (gate, state))| {
            if gate.is_limited() || gate.open.load(Ordering::Relaxed) == 0 || state.told.0 {
                return Some(state.look(process, gpu, gate));
            }
            state.rule = Some(FREE);
            None
        });
        rests.reduce(Rest::sooner).unwrap_or(Rest::Idle)
    }
}

impl Rest {
    fn sooner(self, other: Self) -> Self {
        match (self, other) {
            (Self::Idle, Self::Idle) => Self::Idle,
            // One word to sleep on is not enough for two GPUs: work on the other one would not be heard of.
            _ => Self::For(self.longest().min(other.longest())),
        }
    }

    /// How long to sleep where only work is heard of.
    fn longest(self) -> u64 {
        match self {
            Self::Idle => u64::MAX,
            Self::For(nanoseconds) => nanoseconds,
            Self::Window(_, _, nanoseconds) => nanoseconds.min(TICK),
        }
    }
}

impl State {
    fn look(&mut self, process: &Process, gpu: GpuSlot, gate: &Gate) -> Rest {
        let now = futex::now();
        let percent = gate.percent.load(Ordering::Relaxed);
        let is_led = gate.is_limited() && process.control.has_arbiter(now);
        let shared = process.account.pacer(gpu);
        let rule = Rule { percent, is_led };
        // A process that has just come changes nothing for the others.
        if self.rule.replace(rule).is_some_and(|before| before != rule) {
            self.forget_debts(shared, gate, now);
        }
        if gate.is_busy() {
            self.follow(process, shared, gate, now);
        }
        if is_led {
            self.obey(process, gpu, gate)
        } else {
            // The next arbiter must not wait for what nobody wants by then.
            self.tell(process, gpu, false, self.told.1);
            self.pace(gate, shared.read(), percent)
        }
    }

    /// What was had under another rule is not owed under this one: neither time without a limit, nor what an arbiter let us make good.
    fn forget_debts(&mut self, shared: &SharedPacer, gate: &Gate, now: u64) {
        self.pacer = Pacer::default();
        shared.reset(now);
        gate.busy_since.store(now, Ordering::Release);
        self.charged = if self.charged == 0 { 0 } else { now };
    }

    /// Opens and closes by the arbiter's windows.
    fn obey(&mut self, process: &Process, gpu: GpuSlot, gate: &Gate) -> Rest {
        let WindowState { change, number, deadline } = process.control.window(gpu).read();
        let now = futex::now();
        let mut is_open = deadline > now && self.given_back != Some(change);
        // First closed, then looked: see `Gate::enter`.
        gate.set_open(is_open);
        let is_short_pause = self.idle_since > 0 && now.saturating_sub(self.idle_since) < GAP;
        let (mut is_busy, mut wants) = gate.demand();
        if is_open && !wants && !is_short_pause {
            // Another has the GPU as soon as we say so: whoever comes now waits for the next window.
            gate.set_open(false);
            (is_busy, wants) = gate.demand();
            is_open = wants;
            gate.set_open(is_open);
            self.given_back = (!is_open).then_some(change);
        }
        let wants = wants || is_short_pause;
        let drained = match (is_open || is_busy, self.told.1) {
            (false, _) => number,
            // Given back, and ours again.
            (true, drained) if drained == number => number.wrapping_sub(1),
            (true, drained) => drained,
        };
        self.tell(process, gpu, wants, drained);
        match (is_open, is_busy, wants) {
            (true, true, _) => Rest::Window(gpu, change, self.until_news(gate, now).min(deadline - now)),
            (false, true, _) => Rest::For(self.until_drained(gate, now)),
            (true, false, _) => Rest::For(GAP),
            // A pause that is no longer short is told.
            (false, false, true) if is_short_pause => Rest::Window(gpu, change, GAP),
            // Not for long: the arbiter may be gone.
            (false, false, true) => Rest::Window(gpu, change, LONGEST_REST),
            (false, false, false) => Rest::Idle,
        }
    }

    /// Tells the arbiter what it does not know yet.
    fn tell(&mut self, process: &Process, gpu: GpuSlot, wants: bool, drained: u32) {
        if (wants, drained) != self.told {
            self.told = (wants, drained);
            let demand = &process.slot().demand[gpu];
            demand.drained.store(drained, Ordering::Release);
            demand.wants.store(u32::from(wants), Ordering::Release);
            process.wake_arbiter();
        }
    }

    /// How long not to look while work runs and more may come.
    fn until_news(&self, gate: &Gate, now: u64) -> u64 {
        if gate.waiting.load(Ordering::SeqCst) > 0 {
            // Somebody waits for room in the queue, and looks after that.
            return self.time_of_queue(gate).clamp(TICK, QUEUE);
        }
        match self.flow {
            Flow::Steady => SLOW_TICK,
            Flow::Sparse => self.time_of_queue(gate).clamp(TICK, SLOW_TICK),
            Flow::Still => self.until_drained(gate, now),
        }
    }

    /// How long not to look while the queue drains: half of what is left by estimate, then ever longer, as the estimate was wrong. The
    /// end must be seen soon: until then nobody else has the GPU.
    fn until_drained(&self, gate: &Gate, now: u64) -> u64 {
        let (expected, passed) = (self.time_of_queue(gate), now.saturating_sub(self.progressed));
        match expected.checked_sub(passed) {
            Some(left) => (left / 2).clamp(SHORTEST_REST, (left / 8).max(QUEUE / 2)),
            None => ((passed - expected) / 8).clamp(SHORTEST_REST, TICK),
        }
    }

    /// How long what is queued takes, by estimate and by the pace at which such work ends.
    fn time_of_queue(&self, gate: &Gate) -> u64 {
        let most = gate.most_queued.load(Ordering::Relaxed).max(QUEUE);
        gate.queued().min(MOST_QUEUED) * QUEUE / most
    }

    /// Opens and closes by our own account and that of all processes here.
    fn pace(&mut self, gate: &Gate, shared: Pacer, percent: u32) -> Rest {
        let now = futex::now();
        let is_open = gate.open.load(Ordering::Relaxed) == 1;
        let is_spent = self.pacer.is_spent(now, percent) || shared.is_spent(now, percent);
        let opens_at = self.pacer.opens_at().max(shared.opens_at());
        // Work that waits for other work, which waits at the gate, would be charged for ever.
        let is_stuck = !is_open && gate.is_busy() && now > self.progressed.max(self.closed) + HOLD;
        if is_open && is_spent {
            gate.set_open(false);
            self.closed = now;
        } else if !is_open && (percent >= 100 || now >= opens_at || is_stuck) {
            gate.set_open(true);
        }
        // Another process may have charged more until then, or the limits may change.
        let reopens = opens_at.saturating_sub(now).clamp(1_000, LONGEST_REST);
        match (gate.is_busy(), gate.open.load(Ordering::Relaxed) == 1) {
            (true, true) => Rest::For(self.until_news(gate, now)),
            (true, false) => Rest::For(reopens.min(TICK)),
            (false, false) => Rest::For(reopens),
            (false, true) => Rest::Idle,
        }
    }

    /// Charges up to now, and notices when all has ended.
    fn follow(&mut self, process: &Process, shared: &SharedPacer, gate: &Gate, now: u64) {
        let percent = self.rule.unwrap_or(FREE).percent;
        // Each time: it costs next to nothing, and must not be done before there is work. A program that only watches the GPU has no driver.
        fences::relax();
        let looking = gate.looking();
        let questions = gate.lanes().questions();
        let answers = fences::ask(&questions);
        let mut lanes = gate.lanes();
        let ended = lanes.pass(&answers, &process.compute.costs);
        self.flow = Flow::of(lanes.launches - self.launches);
        // No event is put beside a capture, which it might get into: what was launched before has ended when it should have.
        let (may_fence, should_have_ended) = (process.compute.is_quiet(), now >= self.charged + self.left);
        if matches!(self.flow, Flow::Still) && (may_fence || should_have_ended) {
            // Nothing new since the last look: what has no fence gets one, or its end would not be seen.
            lanes.fence_all(may_fence);
        }
        self.launches = lanes.launches;
        let is_empty = lanes.are_empty() && gate.set_idle();
        let is_seen_at_work = answers.len() < questions.len() || gate.traffic.is_anybody();
        drop((lanes, looking));
        if self.charged == 0 {
            if is_empty && matches!(self.flow, Flow::Still) {
                // Somebody came to the gate, and waits there.
                return;
            }
            // Work has come. A short pause before it is charged with it. If it did not say since when, it is just on the way.
            let came = gate.busy_since.load(Ordering::Acquire);
            let began = if came > self.idle_since { came.min(now) } else { now };
            self.charged = if began - self.idle_since < GAP { self.idle_since } else { began };
            (self.progressed, self.flow) = (began, Flow::Sparse);
        }
        // Nothing has come, and nothing is known to run: perhaps it ended long ago. If not, the rest is charged with the next look.
        let may_have_ended = matches!(self.flow, Flow::Still) && !is_seen_at_work;
        // Our own thread looks far more often than that, unless the process was stopped: that time was not its own.
        let was_stopped = now - self.charged > HOLD;
        let until = if may_have_ended || was_stopped { now.min(self.charged + self.left) } else { now };
        self.left = if until < now { 0 } else { self.time_of_queue(gate) };
        self.pacer.charge(self.charged, until, percent);
        shared.charge(self.charged, until, percent);
        self.learn_pace(gate, ended, until - self.charged);
        self.charged = if was_stopped { now } else { until };
        if is_empty {
            (self.charged, self.idle_since) = (0, until);
        }
        if ended > 0 || is_empty {
            self.progressed = now;
        }
    }

    /// Learns how much estimated work ends in a stretch of time.
    fn learn_pace(&mut self, gate: &Gate, ended: u64, busy: u64) {
        let (all_ended, all_busy) = &mut self.pace;
        (*all_ended, *all_busy) = (*all_ended + ended, *all_busy + busy);
        if *all_busy >= PACE {
            let most = (all_ended.saturating_mul(QUEUE) / *all_busy).clamp(QUEUE, MOST_QUEUED);
            let known = gate.most_queued.load(Ordering::Relaxed);
            gate.most_queued.store(known.midpoint(most), Ordering::Relaxed);
            self.pace = (0, 0);
        }
    }
}
