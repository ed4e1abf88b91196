//! Who goes next on one GPU.
//!
//! Two numbers per tenant. The *account* (see [`Pacer`]) holds it to its compute_ceiling_percent: it may go when real time has caught
//! up. *Virtual time*, busy time by share, orders those who may go: the one that had least for its share is next. For
//! hard shares both say the same; for soft ones the second decides who grows into what others leave.

use tessera_limits::pacer::{Pacer, QUANTUM};

/// A window is cut for a tenant that arrives from idle, but not before this.
const SHORTEST: u64 = 1_000_000;

/// What passes between the opening of a window and its first kernel, and between its last kernel and our hearing of it, is not the
/// tenant's time: the GPU is idle then, for two wake-ups each way. The tenant tells how long it was busy, and is believed as
/// far as this, and half of the window. Measured on an H200: 0.3 to 0.4 ms; on one machine shares were short as if it were 1.3.
const MOST_SWITCH: u64 = 2_000_000;

/// A tenant that has not drained this long after its window loses it all the same. It is charged until it has,
const OVERRUN: u64 = 250_000_000;

/// and gets no other one before, but after this long: its work may wait for some that waits for a window.
const STUCK: u64 = 2_500_000_000;

/// However long its work ran over, it owes no more than so much of it.
const MOST_DEBT: u64 = 5_000_000_000;

/// What one container may use of the GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// Percent guaranteed; 0: what others leave.
    pub compute_percent: u32,
    /// Percent at most.
    pub compute_ceiling_percent: u32,
    /// Whether a percentage means throughput: then time counts by the GPU's power factor.
    pub by_throughput: bool,
}

/// What a container tells.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TenantReport {
    /// Processes that have work running or waiting.
    pub wanting: u32,
    /// Those of them that have none of this window's work running any more and have given it back.
    pub drained: u32,
    /// Nanoseconds the GPU was busy for it, since it came.
    pub busy_ns: u64,
}

/// What to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WindowAction<Id> {
    /// A new window for a tenant.
    Open {
        /// Whose.
        tenant: Id,
        /// Until when.
        deadline: u64,
    },
    /// The window goes on, or ends now.
    SetDeadline {
        /// Whose.
        tenant: Id,
        /// Until when.
        deadline: u64,
    },
}

/// The tenants of one GPU.
#[derive(Debug)]
pub struct GpuArbiter<Id> {
    tenants: Vec<Tenant<Id>>,
    running: Option<Running>,
    /// Thousandths by which time counts for throughput.
    factor: u64,
}

#[derive(Debug)]
struct Tenant<Id> {
    id: Id,
    share: Share,
    seen: TenantReport,
    /// It began to want while somebody else was running.
    has_arrived: bool,
    /// Since when it has wanted, or has had no window: from then on others keep it waiting, where its account would let it go.
    waits_since: u64,
    pacer: Pacer,
    virtual_time: u64,
    used: u64,
    windows: u64,
    /// The window that it lost and whose work still runs.
    overrun: Option<Running>,
}

/// The window that is open, or being drained.
#[derive(Debug)]
struct Running {
    tenant: usize,
    since: u64,
    /// What the tenant told of its busy time then.
    told: u64,
    /// How much of the window has been charged.
    charged: u64,
    deadline: u64,
    /// How long others had kept the tenant waiting.
    kept: u64,
    /// How long after its end it keeps others out while its work runs: not at all where that ran over an earlier window already.
    patience: u64,
}

/// What a tenant has had.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WindowUsage {
    /// Nanoseconds of the GPU.
    pub time_ns: u64,
    /// Windows.
    pub windows: u64,
}

impl<Id> Default for GpuArbiter<Id> {
    fn default() -> Self {
        Self { tenants: Vec::new(), running: None, factor: 1_000 }
    }
}

impl<Id: Copy + PartialEq> GpuArbiter<Id> {
    /// Takes a tenant in, or changes its share.
    pub fn set(&mut self, id: Id, share: Share) {
        match self.tenants.iter_mut().find(|tenant| tenant.id == id) {
            Some(tenant) if tenant.share == share => {}
            // Debts of another share would be too much or too little.
            Some(tenant) => (tenant.share, tenant.pacer) = (share, Pacer::default()),
            None => self.tenants.push(Tenant {
                id,
                share,
                seen: TenantReport::default(),
                has_arrived: false,
                waits_since: 0,
                pacer: Pacer::default(),
                virtual_time: self.least_virtual_time(),
                used: 0,
                windows: 0,
                overrun: None,
            }),
        }
    }

    /// Whether the factor matters to any tenant.
    #[must_use]
    pub fn shares_throughput(&self) -> bool {
        self.tenants.iter().any(|tenant| tenant.share.by_throughput && tenant.share.is_limited())
    }

    /// Sets by what factor work now runs faster in windows than alone.
    pub fn set_factor(&mut self, factor: f64) {
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "between one and two")]
        let thousandths = (factor.clamp(1.0, 2.0) * 1e3) as u64;
        self.factor = thousandths;
    }

    /// Nanoseconds of the GPU that all tenants have had.
    #[must_use]
    pub fn busy(&self) -> u64 {
        self.tenants.iter().map(|tenant| tenant.used).sum()
    }

    /// A tenant is gone.
    pub fn remove(&mut self, id: Id) {
        let Some(place) = self.tenants.iter().position(|tenant| tenant.id == id) else { return };
        self.tenants.remove(place);
        self.running = self.running.take().filter(|running| running.tenant != place).map(|mut running| {
            running.tenant -= usize::from(running.tenant > place);
            running
        });
    }

    /// What a tenant has had.
    #[must_use]
    pub fn usage(&self, id: Id) -> WindowUsage {
        let tenant = self.tenants.iter().find(|tenant| tenant.id == id);
        tenant.map_or_else(WindowUsage::default, |tenant| WindowUsage {
            time_ns: tenant.used,
            windows: tenant.windows,
        })
    }

    /// Decides, from what is seen of each tenant.
    pub fn step(&mut self, now: u64, seen: impl Fn(Id) -> TenantReport) -> Vec<WindowAction<Id>> {
        let least = self.least_virtual_time();
        for tenant in &mut self.tenants {
            let before = std::mem::replace(&mut tenant.seen, seen(tenant.id));
            if tenant.seen.wants() && !before.wants() {
                // Time it did not want is not owed to it.
                tenant.virtual_time = tenant.virtual_time.max(least);
                tenant.has_arrived = true;
                tenant.waits_since = now;
            }
            if let Some(mut window) = tenant.overrun.take() {
                tenant.charge(&mut window, now, self.factor);
                let most = least + MOST_DEBT * 100 / u64::from(tenant.share.compute_percent.max(1));
                tenant.virtual_time = tenant.virtual_time.min(most);
                tenant.overrun = Some(window).filter(|_| !tenant.seen.has_drained());
            }
        }
        let mut acts = Vec::new();
        self.follow(now, &mut acts);
        if self.running.is_none()
            && let Some(next) = self.next(now)
        {
            let deadline = now + QUANTUM;
            let tenant = &mut self.tenants[next];
            (tenant.windows, tenant.has_arrived) = (tenant.windows + 1, false);
            let patience = if tenant.overrun.take().is_some() { 0 } else { OVERRUN };
            let kept = now.saturating_sub(tenant.waits_since.max(tenant.pacer.opens_at()));
            acts.push(WindowAction::Open { tenant: tenant.id, deadline });
            let told = tenant.seen.busy_ns;
            self.running =
                Some(Running { tenant: next, since: now, told, charged: 0, deadline, kept, patience });
        }
        acts
    }

    /// When to look again though nothing is heard; none: when somebody is heard.
    #[must_use]
    pub fn next_step_at(&self, now: u64) -> Option<u64> {
        let Some(running) = &self.running else {
            let wanting = self.tenants.iter().filter(|tenant| tenant.seen.wants());
            return wanting.map(|tenant| tenant.goes_at().max(now)).min();
        };
        if now >= running.deadline {
            // Whoever dies while it drains is not heard. Whoever drains is.
            return Some(now + QUANTUM / 4);
        }
        let lengthens = running.deadline - QUANTUM / 4;
        let cuts = running.since + SHORTEST;
        let waits = self.tenants.iter().any(|tenant| tenant.has_arrived);
        let next = if lengthens > now { lengthens } else { running.deadline };
        Some(if waits && cuts > now { next.min(cuts) } else { next })
    }

    /// Charges the window that is open; ends, cuts or lengthens it.
    fn follow(&mut self, now: u64, acts: &mut Vec<WindowAction<Id>>) {
        let Some(mut running) = self.running.take() else { return };
        let current = running.tenant;
        let tenant = &mut self.tenants[current];
        tenant.charge(&mut running, now, self.factor);
        let (id, seen) = (tenant.id, tenant.seen);
        let is_over = now >= running.deadline;
        if seen.has_drained() {
            if !is_over {
                // Given back before its end. Nobody there may think that it goes on.
                acts.push(WindowAction::SetDeadline { tenant: id, deadline: now });
            }
            return;
        }
        if now >= running.deadline + running.patience {
            tenant.overrun = Some(running);
            return;
        }
        if seen.drained > 0 && !is_over {
            // A process gave it back too early, and others go on: so may it.
            acts.push(WindowAction::SetDeadline { tenant: id, deadline: running.deadline });
        }
        let other = self.next_but(now, Some(current));
        let may_stay = self.tenants[current].may_go(now);
        // Nobody else: go on without a break, shortly before the end so that there is none.
        if !is_over && now + QUANTUM / 4 >= running.deadline && other.is_none() && may_stay {
            running.deadline = now + QUANTUM;
            acts.push(WindowAction::SetDeadline { tenant: id, deadline: running.deadline });
        }
        let is_due = |other: usize| {
            self.tenants[other].has_arrived && self.tenants[other].order() <= self.tenants[current].order()
        };
        if !is_over && now >= running.since + SHORTEST && other.is_some_and(is_due) {
            running.deadline = now;
            acts.push(WindowAction::SetDeadline { tenant: id, deadline: now });
        }
        self.running = Some(running);
    }

    fn next(&self, now: u64) -> Option<usize> {
        self.next_but(now, None)
    }

    /// Who goes next, leaving one out. Ties: the first.
    fn next_but(&self, now: u64, but: Option<usize>) -> Option<usize> {
        let all = self.tenants.iter().enumerate();
        all.filter(|(place, tenant)| Some(*place) != but && tenant.seen.wants() && tenant.may_go(now))
            .min_by_key(|(_, tenant)| tenant.order())
            .map(|(place, _)| place)
    }

    /// Where those who want are.
    fn least_virtual_time(&self) -> u64 {
        let wanting = self.tenants.iter().filter(|tenant| tenant.seen.wants());
        let least = wanting.map(|tenant| tenant.virtual_time).min();
        least.or_else(|| self.tenants.iter().map(|tenant| tenant.virtual_time).max()).unwrap_or(0)
    }
}

impl TenantReport {
    fn wants(self) -> bool {
        self.wanting > 0
    }

    /// Whether all that want have given the window back; who wants nothing has, too.
    fn has_drained(self) -> bool {
        self.drained >= self.wanting
    }
}

impl Running {
    /// For how much of the window so far the GPU was busy for the tenant, by what it tells.
    fn busy(&self, now: u64, told: u64) -> u64 {
        let open = now.saturating_sub(self.since);
        let idle = open.saturating_sub(told.saturating_sub(self.told));
        open - idle.min(MOST_SWITCH).min(open / 2)
    }
}

impl Share {
    /// Whether there is a ceiling to hold it to.
    fn is_limited(self) -> bool {
        (1..100).contains(&self.compute_ceiling_percent)
    }
}

impl<Id> Tenant<Id> {
    fn may_go(&self, now: u64) -> bool {
        self.goes_at() <= now
    }

    /// When it may have a window.
    fn goes_at(&self) -> u64 {
        match &self.overrun {
            Some(window) => window.deadline + STUCK,
            None if self.share.is_limited() => self.pacer.opens_at(),
            None => 0,
        }
    }

    /// Shares go before those who have none. Before all goes work that has run over for so long that it may wait for some of its own:
    /// its virtual time grows all the while.
    fn order(&self) -> (bool, bool, u64) {
        (self.overrun.is_none(), self.share.compute_percent == 0, self.virtual_time)
    }

    /// Charges what has become of a window since it was charged last.
    fn charge(&mut self, window: &mut Running, now: u64, factor: u64) {
        let all = window.busy(now, self.seen.busy_ns);
        let (from, busy) = (window.since + window.charged, all.saturating_sub(window.charged));
        window.charged += busy;
        self.waits_since = now;
        self.used += busy;
        self.virtual_time += busy * 100 / u64::from(self.share.compute_percent.max(1));
        let owed =
            self.pacer.opens_at().saturating_sub(now) / 100 * u64::from(self.share.compute_ceiling_percent);
        if self.share.is_limited() && owed < MOST_DEBT {
            let counted = if self.share.by_throughput { busy * factor / 1_000 } else { busy };
            self.pacer.charge_after(window.kept, from, from + counted, self.share.compute_ceiling_percent);
        }
    }
}

#[cfg(test)]
#[path = "gpu_arbiter/tests.rs"]
mod tests;
