//! Follows what runs, charges the time, opens and closes the gates. Runs on our own thread.

use std::sync::atomic::Ordering;

use tessera_limits::pacer::Pacer;
use tessera_limits::{CARDS, futex};

use super::Gate;
use crate::door::library::driver_functions;
use crate::grant::Process;

driver_functions! { CUDA:
    exchange_capture_mode = c"cuThreadExchangeStreamCaptureMode" (mode: *mut i32);
}

/// This thread's calls must not disturb captures of others.
const RELAXED: i32 = 2;

/// How often work is looked at while there is some.
const TICK: u64 = 500_000;

/// A pause shorter than this counts as work: the card waits for the program, and nobody else can use such a pause.
const GAP: u64 = 1_000_000;

/// What is known of each card's work.
#[derive(Default)]
pub struct Controller {
    cards: [State; CARDS],
    is_relaxed: bool,
}

#[derive(Default)]
struct State {
    pacer: Pacer,
    percent: u32,
    /// Until when busy time is charged; 0 when the card is idle for us.
    charged: u64,
    /// When the last work had ended.
    idle_since: u64,
    /// Launches seen at the last look: a stream that is fed needs no fence yet.
    launches: u64,
}

impl Controller {
    /// Looks at all cards; returns in how many nanoseconds to look again, if at all.
    pub fn look(&mut self, process: &Process) -> Option<u64> {
        if !self.is_relaxed {
            let mut mode = RELAXED;
            // SAFETY: `mode` is read and written. Not possible before the program has initialised the driver.
            self.is_relaxed = unsafe { exchange_capture_mode(&raw mut mode) } == crate::cuda::SUCCESS;
        }
        let is_quiet = process.compute.capturing.load(Ordering::SeqCst) <= 0;
        let gates = process.compute.gates.iter().zip(&mut self.cards);
        gates.filter_map(|(gate, state)| state.look(gate, is_quiet)).min()
    }
}

impl State {
    fn look(&mut self, gate: &Gate, is_quiet: bool) -> Option<u64> {
        let now = futex::now();
        let percent = gate.percent.load(Ordering::Relaxed);
        if percent != self.percent {
            (self.percent, self.pacer) = (percent, Pacer::default());
        }
        if gate.busy.load(Ordering::Acquire) == 1 {
            self.follow(gate, now, is_quiet);
        }
        let is_open = gate.open.load(Ordering::Relaxed) == 1;
        if is_open && self.pacer.is_spent(now, percent) {
            gate.open.store(0, Ordering::Release);
        } else if !is_open && (percent >= 100 || now >= self.pacer.opens_at()) {
            gate.open.store(1, Ordering::Release);
            futex::wake(&gate.open);
        }
        let is_busy = gate.busy.load(Ordering::Acquire) == 1;
        let reopens = self.pacer.opens_at().saturating_sub(futex::now()).max(1_000);
        match (is_busy, gate.open.load(Ordering::Relaxed) == 1) {
            (true, true) => Some(TICK),
            (true, false) => Some(reopens.min(TICK)),
            (false, false) => Some(reopens),
            (false, true) => None,
        }
    }

    /// Charges up to now, and notices when all has ended.
    fn follow(&mut self, gate: &Gate, now: u64, is_quiet: bool) {
        let mut lanes = gate.lanes();
        let ended = lanes.follow();
        if is_quiet && lanes.launches == self.launches {
            // Nothing new since the last look: what has no fence gets one, or its end would not be seen.
            lanes.fence_all();
        }
        self.launches = lanes.launches;
        let is_empty = lanes.are_empty();
        if is_empty {
            // Under the lock: a launch that comes now sets it again.
            gate.busy.store(0, Ordering::Release);
        }
        drop(lanes);
        if self.charged == 0 {
            // Work has come. A short pause before it is charged with it.
            let begin = now.saturating_sub(TICK).max(self.idle_since);
            self.charged = if now - self.idle_since < GAP + TICK { self.idle_since } else { begin };
        }
        self.pacer.charge(self.charged, now, self.percent);
        self.charged = now;
        if is_empty {
            (self.charged, self.idle_since) = (0, now);
            gate.queued.store(0, Ordering::Relaxed);
        } else {
            gate.note_ended(ended);
        }
        if ended > 0 || is_empty {
            gate.progress.fetch_add(1, Ordering::Release);
            if gate.waiting.load(Ordering::SeqCst) > 0 {
                futex::wake(&gate.progress);
            }
        }
    }
}
