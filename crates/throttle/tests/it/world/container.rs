//! Containers, and the account that their processes share.

use tessera_arbiter::Share;
use tessera_throttle::Nanos;
use tessera_throttle::controller::{ArbiterWindow, Charge};
use tessera_throttle::gate::LaunchGate;
use tessera_throttle::pacer::Pacer;

/// What the processes of a container share.
pub(super) struct Container {
    pub(super) account: SharedAccount,
    pub(super) window: ArbiterWindow,
    /// The guaranteed share.
    pub(super) percent: u32,
    /// The largest share, which the library enforces without an arbiter.
    pub(super) ceiling: u32,
}

/// The account in the container's file.
#[derive(Default)]
pub(super) struct SharedAccount {
    charged: Nanos,
    pub(super) pacer: Pacer,
    pub(super) busy: Nanos,
}

impl Container {
    pub(super) fn new(percent: u32, ceiling: u32) -> Self {
        let window = ArbiterWindow { change: 0, number: 0, deadline: Nanos::ZERO, queue_limit: Nanos::ZERO };
        Self { account: SharedAccount::default(), window, percent, ceiling }
    }

    /// Puts the limit into force, as the library does.
    pub(super) fn limit(&self, gate: &LaunchGate<u32>) {
        gate.set_limit(self.ceiling, self.percent < 100);
    }

    /// Returns the share as the arbiter gets it.
    pub(super) fn share(&self) -> Share {
        let Self { percent, ceiling, .. } = *self;
        Share { compute_percent: percent, compute_ceiling_percent: ceiling, by_throughput: false }
    }
}

impl SharedAccount {
    /// Charges the part of a busy time that no other process has charged.
    pub(super) fn charge(&mut self, Charge { from, to, busy, percent }: Charge) {
        let from = from.max(self.charged);
        self.charged = self.charged.max((from + busy).min(to));
        let busy = self.charged - from;
        self.busy += busy;
        self.pacer.charge(to - busy, to, percent);
    }

    /// Clears debts.
    pub(super) fn reset(&mut self, now: Nanos) {
        self.pacer = Pacer::at(self.pacer.opens_at().min(now));
    }
}
