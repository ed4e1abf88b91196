//! One tenant of a GPU: its accounts, and the charges for its windows.

use std::cmp::Ordering;

use tessera_throttle::Nanos;
use tessera_throttle::back_pressure::DEEP_QUEUE_LIMIT;
use tessera_throttle::pacer::Pacer;

use super::{
    DRAIN_TIMEOUT_NS, IdleAllowance, MAX_CUT_COST_NS, MAX_DEBT_NS, MIN_WINDOW_NS, QUANTUM, STUCK_TIMEOUT_NS,
    STUCK_WINDOW_NS, Share, TenantReport, WindowAction, WindowUsage,
};

/// Longest time in nanoseconds for which others kept a tenant waiting that it may make good.
const MAX_KEPT_WAITING_NS: u64 = 1_000_000_000;

#[derive(Debug)]
pub(super) struct Tenant<Id> {
    pub(super) id: Id,
    pub(super) share: Share,
    pub(super) seen: TenantReport,
    /// True if the tenant began to want the GPU and has had no window since.
    pub(super) has_arrived: bool,
    /// Time at which the tenant last began to want the GPU.
    pub(super) arrived_at: u64,
    /// Time since which the tenant has wanted the GPU or its last window was charged. From then on
    /// it waits for others, unless its own account stops it.
    waits_since: u64,
    /// Nanoseconds for which others kept the tenant waiting and that it has not made good yet.
    kept_waiting: u64,
    /// Time at which the tenant last ceased to want the GPU.
    pub(super) left_at: u64,
    /// Virtual time by which the tenant was behind the others at that time.
    lag: u64,
    /// Limits the tenant to its ceiling, by the time that it reports.
    ceiling: Pacer,
    /// Ahead of real time if the tenant has kept the GPU from others for longer than its ceiling allows.
    occupancy: Pacer,
    /// Ahead of real time if the tenant has had its guaranteed share.
    guarantee: Pacer,
    pub(super) virtual_time: u64,
    idle_allowance: IdleAllowance,
    /// Nanoseconds for which work of the tenant blocked others after the end of its windows, less what
    /// the tenant's share has paid since.
    pub(super) overstayed: u64,
    overstayed_at: u64,
    pub(super) usage: WindowUsage,
    /// The window that the tenant lost while its work still ran.
    pub(super) overrun: Option<Running>,
    /// True if all processes of the tenant are stopped.
    pub(super) is_stopped: bool,
}

/// A window that is open or being drained.
#[derive(Debug)]
pub(super) struct Running {
    pub(super) tenant: usize,
    pub(super) since: u64,
    pub(super) deadline: u64,
    /// Work in nanoseconds that the tenant may have queued.
    pub(super) queue_limit_ns: u64,
    /// Time at which that became less.
    pub(super) shortened_at: u64,
    /// Nanoseconds after the deadline for which the window stays reserved while its work runs. 0 if
    /// the work had already overrun an earlier window.
    pub(super) drain_timeout: u64,
    /// True if the tenant had kept the GPU for longer than its ceiling allows when the window was opened or
    /// extended.
    pub(super) is_borrowed: bool,
    /// The tenant for which the window was cut.
    pub(super) cut_for: Option<usize>,
    /// Time of the last step.
    pub(super) stepped_at: u64,
    /// Busy time that the tenant had reported when the window opened.
    reported_busy: u64,
    /// Nanoseconds of the window that have been charged as time for which the tenant kept the GPU from others.
    kept: u64,
    /// Nanoseconds of the window that have been charged as busy.
    busy: u64,
    /// Nanoseconds of the window that have been added to the tenant's virtual time.
    occupied: u64,
    /// The tenant's virtual time when it lost the window.
    pub(super) virtual_time: u64,
    /// Nanoseconds of the window that are believed to be idle.
    idle: u64,
}

/// A window that was cut: the idle time in it that its tenant did not cause.
#[derive(Debug)]
pub(super) struct Cut {
    /// The tenant of the window.
    pub(super) loser: usize,
    /// The tenant for which the window was cut.
    pub(super) winner: usize,
    pub(super) idle: u64,
}

impl Running {
    /// Returns the change that the caller must write for the tenant `id`.
    pub(super) fn action<Id>(&self, id: Id, is_new: bool) -> WindowAction<Id> {
        let Self { deadline, queue_limit_ns, .. } = *self;
        WindowAction { tenant: id, is_new, deadline, queue_limit_ns }
    }

    /// Ends a borrowed window at the time at which another tenant claims it. Then little work is queued by that time.
    pub(super) fn end_for_claim(&mut self, claimed_at: u64) {
        if self.is_borrowed {
            self.deadline = self.deadline.min(claimed_at.max(self.since + MIN_WINDOW_NS));
        }
    }

    /// Returns true if the window was cut while much work was queued. The tenant for which it was cut does not wait
    /// until that has ended: the driver lets both compute in turns.
    pub(super) fn has_deep_queue(&self, now: u64) -> bool {
        self.cut_for.is_some() && now < self.shortened_at + DEEP_QUEUE_LIMIT.0
    }

    /// Returns what the tenant for which the window was cut has to pay, once the window has ended.
    pub(super) fn cut(&self) -> Option<Cut> {
        Some(Cut { loser: self.tenant, winner: self.cut_for?, idle: self.idle.min(MAX_CUT_COST_NS) })
    }
}

impl<Id> Tenant<Id> {
    pub(super) fn new(id: Id, share: Share, virtual_time: u64) -> Self {
        Self {
            id,
            share,
            seen: TenantReport::default(),
            has_arrived: false,
            arrived_at: 0,
            waits_since: 0,
            kept_waiting: 0,
            left_at: 0,
            lag: 0,
            ceiling: Pacer::default(),
            occupancy: Pacer::default(),
            guarantee: Pacer::default(),
            virtual_time,
            idle_allowance: IdleAllowance::default(),
            overstayed: 0,
            overstayed_at: 0,
            usage: WindowUsage::default(),
            overrun: None,
            is_stopped: false,
        }
    }

    /// Records what the others owe the tenant, which has ceased to want the GPU and is charged up to this time. `least`
    /// is the lowest virtual time of the others.
    pub(super) fn keep_lag(&mut self, least: u64) {
        let lag = least.saturating_sub(self.virtual_time);
        self.lag = lag.min(self.virtual_length(MAX_KEPT_WAITING_NS));
    }

    /// Records that the tenant wants the GPU again. It gets no compensation for the time in which it did
    /// not, but keeps what it was owed before. `least` is the lowest virtual time of the other tenants.
    pub(super) fn arrive(&mut self, now: u64, least: u64) {
        let passed = now.saturating_sub(self.left_at);
        let lag = self.lag.saturating_sub(self.virtual_length(passed));
        self.virtual_time = self.virtual_time.max(least.saturating_sub(lag));
        self.kept_waiting = self.kept_waiting.saturating_sub(passed);
        (self.has_arrived, self.arrived_at, self.waits_since) = (true, now, now);
    }

    /// Changes the share. The accounts start again, because their debts were computed for the old share.
    pub(super) fn set_share(&mut self, share: Share) {
        self.share = share;
        (self.ceiling, self.occupancy, self.guarantee) = Default::default();
        // Until the next window it waited for the old share.
        (self.kept_waiting, self.waits_since) = (0, u64::MAX);
    }

    pub(super) fn may_run(&self, now: u64) -> bool {
        self.eligible_at() <= now
    }

    /// Returns whether the tenant wants a window and may get one.
    pub(super) fn may_open(&self, now: u64) -> bool {
        self.seen.wants() && self.may_run(now)
    }

    /// Returns the earliest time of the tenant's next window.
    pub(super) fn eligible_at(&self) -> u64 {
        match &self.overrun {
            Some(window) => window.deadline + STUCK_TIMEOUT_NS,
            None if self.share.is_limited() => self.ceiling.opens_at().0,
            None => 0,
        }
    }

    /// Forgets overstayed time, as fast as the tenant's share pays for it.
    pub(super) fn forget_overstayed(&mut self, now: u64) {
        let passed = now.saturating_sub(self.overstayed_at);
        let paid = passed / 100 * u64::from(self.share.compute_percent.max(1));
        (self.overstayed, self.overstayed_at) = (self.overstayed.saturating_sub(paid), now);
    }

    /// Returns the key by which tenants are ordered.
    ///
    /// A tenant whose work has overrun comes first once it is eligible, because its work may depend
    /// on work of its own that waits, and its virtual time keeps growing. Tenants that kept the GPU for longer than
    /// their ceiling allows, whatever they report, come after those that did not. Tenants with a share come before
    /// tenants without one.
    pub(super) fn order(&self, now: u64) -> (bool, bool, bool, u64) {
        (self.overrun.is_none(), self.is_over(now), self.share.compute_percent == 0, self.virtual_time)
    }

    /// Returns whether the tenant has kept the GPU from others for longer than its ceiling allows.
    pub(super) fn is_over(&self, now: u64) -> bool {
        self.share.is_limited() && self.occupancy.opens_at().0 > now
    }

    /// Returns the time from which the tenant gets a window before tenants that borrow time.
    pub(super) fn within_ceiling_at(&self) -> u64 {
        let occupancy = if self.share.is_limited() { self.occupancy.opens_at().0 } else { 0 };
        self.eligible_at().max(occupancy)
    }

    /// Returns when the open window of this tenant may be cut for another one that has arrived: once the
    /// other one is next, or once this tenant has had its share and the other one is owed a part of its own.
    pub(super) fn gives_way_at(&self, window: &Running, now: u64, arrived: &Self) -> u64 {
        let percent = u64::from(self.share.compute_percent.clamp(1, 100));
        if window.is_borrowed && !arrived.is_over(now) {
            return now;
        }
        let (own, other) = (self.order(now), arrived.order(now));
        let by_order = match (own.0, own.2).cmp(&(other.0, other.2)) {
            Ordering::Less => return u64::MAX,
            Ordering::Equal => now + other.3.saturating_sub(own.3).div_ceil(100) * percent,
            Ordering::Greater => return now,
        };
        // Reports of busy time come late, so idle time in the window does not count yet.
        let account = self.guarantee.opens_at().0 + window.idle * 100 / percent;
        let by_share = now + now.saturating_sub(account) / (100 - percent).max(1) * percent;
        by_order.min(by_share.max(arrived.guarantee.opens_at().0))
    }

    /// Opens a window. `tenant` is the place of this tenant.
    pub(super) fn open(&mut self, tenant: usize, now: u64, queue_limit_ns: u64) -> Running {
        (self.usage.windows, self.has_arrived) = (self.usage.windows + 1, false);
        let waited = now.saturating_sub(self.waits_since.max(self.eligible_at()));
        self.kept_waiting = (self.kept_waiting + waited).min(MAX_KEPT_WAITING_NS);
        let has_overrun = self.overrun.take().is_some();
        let length = if has_overrun { STUCK_WINDOW_NS } else { QUANTUM };
        Running {
            tenant,
            since: now,
            deadline: now + length,
            queue_limit_ns,
            shortened_at: 0,
            is_borrowed: self.is_over(now),
            drain_timeout: if has_overrun { 0 } else { DRAIN_TIMEOUT_NS },
            cut_for: None,
            stepped_at: now,
            reported_busy: self.seen.busy_ns,
            kept: 0,
            busy: 0,
            occupied: 0,
            virtual_time: 0,
            idle: 0,
        }
    }

    /// Charges the part of a window that has passed since the last charge.
    pub(super) fn charge(&mut self, window: &mut Running, now: u64, factor: u64) {
        let open = now.saturating_sub(window.since);
        let occupied = open.saturating_sub(window.occupied);
        window.occupied = open;
        self.charge_occupied(occupied);
        self.usage.open_ns += occupied;
        let reported_idle = open.saturating_sub(self.seen.busy_ns.saturating_sub(window.reported_busy));
        let ceiling = self.share.compute_ceiling_percent;
        window.idle = self.idle_allowance.believe(now, ceiling, open, reported_idle, window.idle);
        let kept = (open - window.idle).saturating_sub(window.kept);
        let busy = (open - reported_idle).saturating_sub(window.busy);
        (window.kept, window.busy) = (window.kept + kept, window.busy + busy);
        self.waits_since = now;
        self.usage.busy_ns += busy;
        let kept_waiting = Nanos(self.kept_waiting);
        let by_throughput = self.share.by_throughput;
        let charge = |account: &mut Pacer, time: u64, percent: u32| {
            let owed = account.opens_at().0.saturating_sub(now) / 100 * u64::from(percent);
            if owed < MAX_DEBT_NS {
                let counted = if by_throughput { time * factor / 1_000 } else { time };
                let from = Nanos(now - time);
                account.charge_after(kept_waiting, from, from + Nanos(counted), percent);
            }
            now.saturating_sub(account.opens_at().0)
        };
        let mut behind = charge(&mut self.guarantee, kept, self.share.compute_percent.max(1));
        if self.share.is_limited() {
            behind = charge(&mut self.occupancy, kept, ceiling);
            charge(&mut self.ceiling, busy, ceiling);
        }
        self.kept_waiting = self.kept_waiting.min(behind);
    }

    /// Takes back what was charged since the tenant lost a window: it is stopped, and its work has ended. It gets no
    /// compensation either; `least` is the lowest virtual time of the others.
    pub(super) fn forgive(&mut self, window: &mut Running, now: u64, least: u64) {
        self.virtual_time = self.virtual_time.min(window.virtual_time).max(least);
        window.occupied = now.saturating_sub(window.since);
    }

    /// Charges time for which the tenant kept the GPU from others.
    pub(super) fn charge_occupied(&mut self, occupied: u64) {
        self.virtual_time += self.virtual_length(occupied);
    }

    /// Returns the idle time of a cut window to the tenant that lost the window.
    pub(super) fn compensate(&mut self, idle: u64) {
        self.virtual_time = self.virtual_time.saturating_sub(self.virtual_length(idle));
        self.idle_allowance.add(idle);
    }

    /// Returns a time divided by the share.
    fn virtual_length(&self, time: u64) -> u64 {
        time * 100 / u64::from(self.share.compute_percent.max(1))
    }
}
