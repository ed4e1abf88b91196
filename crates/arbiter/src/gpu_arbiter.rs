//! Decides which tenant gets the next window on one GPU.
//!
//! Each tenant has two numbers. Its *account* (see [`Pacer`]) limits it to its ceiling: the tenant
//! may get a window once real time has caught up with the account. Its *virtual time* is its busy
//! time divided by its share and orders the tenants that may get a window: the tenant with the
//! lowest virtual time is next. For hard shares both numbers lead to the same order. For soft
//! shares the virtual time decides which tenant uses the time that others leave.

use tessera_throttle::Nanos;
use tessera_throttle::pacer::{self, Pacer};

/// Length of a window in nanoseconds.
const QUANTUM: u64 = pacer::QUANTUM.0;

/// Shortest window in nanoseconds. A window may be cut for a tenant that arrives from idle, but
/// only after this time.
const MIN_WINDOW_NS: u64 = 1_000_000;

/// Longest idle time in nanoseconds that is subtracted from the charge for a window.
///
/// The GPU is idle between the opening of a window and its first kernel, and between its last
/// kernel and the arbiter's next step. Each takes two wake-ups. The tenant reports how long it was
/// busy. The arbiter accepts the reported idle time up to this limit and up to half of the window.
/// Measured on an H200: 0.3 to 0.4 ms. On one host the shares were short as if a switch took 1.3
/// ms.
const MAX_SWITCH_NS: u64 = 2_000_000;

/// Time in nanoseconds after the end of a window at which a tenant loses the window even though its
/// work still runs. The tenant is charged until its work has ended.
const DRAIN_TIMEOUT_NS: u64 = 250_000_000;

/// Time in nanoseconds after which a tenant whose work still runs gets another window. Its running
/// work may depend on work that waits for a window.
const STUCK_TIMEOUT_NS: u64 = 2_500_000_000;

/// Upper bound in nanoseconds for the overrun that a tenant must repay.
const MAX_DEBT_NS: u64 = 5_000_000_000;

/// The share of one container on the GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// Guaranteed percentage. 0 grants only time that other tenants leave unused.
    pub compute_percent: u32,
    /// Largest percentage that the container may use.
    pub compute_ceiling_percent: u32,
    /// True if a percentage means throughput. Busy time is then multiplied by the GPU's power
    /// factor.
    pub by_throughput: bool,
}

/// What a container reports about the GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TenantReport {
    /// Number of processes that have work running or waiting.
    pub wanting: u32,
    /// Number of the wanting processes that have returned the window because all its work has
    /// ended.
    pub drained: u32,
    /// Nanoseconds for which the GPU was busy for the container so far.
    pub busy_ns: u64,
}

/// A change of a tenant's window that the caller must write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WindowAction<Id> {
    /// Opens a new window.
    Open {
        /// The tenant that the window belongs to.
        tenant: Id,
        /// End of the window in nanoseconds on the monotonic clock.
        deadline: u64,
    },
    /// Extends the open window, or ends it now.
    SetDeadline {
        /// The tenant that the window belongs to.
        tenant: Id,
        /// End of the window in nanoseconds on the monotonic clock.
        deadline: u64,
    },
}

/// The tenants of one GPU and the window that is open.
#[derive(Debug)]
pub struct GpuArbiter<Id> {
    tenants: Vec<Tenant<Id>>,
    running: Option<Running>,
    /// Power factor in thousandths, by which busy time is multiplied for shares of throughput.
    factor: u64,
}

#[derive(Debug)]
struct Tenant<Id> {
    id: Id,
    share: Share,
    seen: TenantReport,
    /// True if the tenant began to want the GPU and has had no window since.
    has_arrived: bool,
    /// Time since which the tenant has wanted the GPU or its last window was charged. From then on
    /// it waits for others, unless its own account stops it.
    waits_since: u64,
    pacer: Pacer,
    virtual_time: u64,
    used: u64,
    windows: u64,
    /// The window that the tenant lost while its work still ran.
    overrun: Option<Running>,
}

/// A window that is open or being drained.
#[derive(Debug)]
struct Running {
    tenant: usize,
    since: u64,
    /// Busy time that the tenant had reported when the window opened.
    reported_busy: u64,
    /// Nanoseconds of the window that have been charged.
    charged: u64,
    deadline: u64,
    /// Nanoseconds for which the tenant had waited for others before the window opened.
    waited: u64,
    /// Nanoseconds after the deadline for which the window stays reserved while its work runs. 0 if
    /// the work had already overrun an earlier window.
    drain_timeout: u64,
}

/// The time and windows that a tenant has used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WindowUsage {
    /// Busy time of the GPU in nanoseconds.
    pub time_ns: u64,
    /// Number of windows.
    pub windows: u64,
}

impl<Id> Default for GpuArbiter<Id> {
    fn default() -> Self {
        Self { tenants: Vec::new(), running: None, factor: 1_000 }
    }
}

impl<Id: Copy + PartialEq> GpuArbiter<Id> {
    /// Adds a tenant or changes its share.
    pub fn set(&mut self, id: Id, share: Share) {
        match self.tenants.iter_mut().find(|tenant| tenant.id == id) {
            Some(tenant) if tenant.share == share => {}
            // The account starts again, because its debt was computed for the old share.
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

    /// Returns whether the power factor affects any tenant.
    #[must_use]
    pub fn shares_throughput(&self) -> bool {
        self.tenants.iter().any(|tenant| tenant.share.by_throughput && tenant.share.is_limited())
    }

    /// Sets the factor by which work currently runs faster in windows than alone.
    pub fn set_factor(&mut self, factor: f64) {
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "between one and two")]
        let thousandths = (factor.clamp(1.0, 2.0) * 1e3) as u64;
        self.factor = thousandths;
    }

    /// Returns the nanoseconds for which the GPU was busy for all tenants.
    #[must_use]
    pub fn busy(&self) -> u64 {
        self.tenants.iter().map(|tenant| tenant.used).sum()
    }

    /// Removes a tenant and its window.
    pub fn remove(&mut self, id: Id) {
        let Some(place) = self.tenants.iter().position(|tenant| tenant.id == id) else { return };
        self.tenants.remove(place);
        self.running = self.running.take().filter(|running| running.tenant != place).map(|mut running| {
            running.tenant -= usize::from(running.tenant > place);
            running
        });
    }

    /// Returns what a tenant has used so far.
    #[must_use]
    pub fn usage(&self, id: Id) -> WindowUsage {
        let tenant = self.tenants.iter().find(|tenant| tenant.id == id);
        tenant.map_or_else(WindowUsage::default, |tenant| WindowUsage {
            time_ns: tenant.used,
            windows: tenant.windows,
        })
    }

    /// Charges the open window and decides about the next one, from the current reports of all
    /// tenants.
    pub fn step(&mut self, now: u64, seen: impl Fn(Id) -> TenantReport) -> Vec<WindowAction<Id>> {
        let least = self.least_virtual_time();
        for tenant in &mut self.tenants {
            let before = std::mem::replace(&mut tenant.seen, seen(tenant.id));
            if tenant.seen.wants() && !before.wants() {
                // The tenant gets no compensation for the time in which it did not want the GPU.
                tenant.virtual_time = tenant.virtual_time.max(least);
                tenant.has_arrived = true;
                tenant.waits_since = now;
            }
            if let Some(mut window) = tenant.overrun.take() {
                tenant.charge(&mut window, now, self.factor);
                let highest = least + MAX_DEBT_NS * 100 / u64::from(tenant.share.compute_percent.max(1));
                tenant.virtual_time = tenant.virtual_time.min(highest);
                tenant.overrun = Some(window).filter(|_| !tenant.seen.has_drained());
            }
        }
        let mut actions = Vec::new();
        self.update_open_window(now, &mut actions);
        if self.running.is_none()
            && let Some(next) = self.next(now)
        {
            let deadline = now + QUANTUM;
            let tenant = &mut self.tenants[next];
            (tenant.windows, tenant.has_arrived) = (tenant.windows + 1, false);
            let drain_timeout = if tenant.overrun.take().is_some() { 0 } else { DRAIN_TIMEOUT_NS };
            let waited = now.saturating_sub(tenant.waits_since.max(tenant.pacer.opens_at().0));
            actions.push(WindowAction::Open { tenant: tenant.id, deadline });
            let reported_busy = tenant.seen.busy_ns;
            self.running = Some(Running {
                tenant: next,
                since: now,
                reported_busy,
                charged: 0,
                deadline,
                waited,
                drain_timeout,
            });
        }
        actions
    }

    /// Returns the latest time of the next [`Self::step`], or `None` if no tenant wants the GPU.
    #[must_use]
    pub fn next_step_at(&self, now: u64) -> Option<u64> {
        let Some(running) = &self.running else {
            let wanting = self.tenants.iter().filter(|tenant| tenant.seen.wants());
            return wanting.map(|tenant| tenant.eligible_at().max(now)).min();
        };
        if now >= running.deadline {
            // A process that drains the window wakes the arbiter. A process that dies before does
            // not, so the arbiter polls.
            return Some(now + QUANTUM / 4);
        }
        let extends = running.deadline - QUANTUM / 4;
        let cuts = running.since + MIN_WINDOW_NS;
        let has_arrival = self.tenants.iter().any(|tenant| tenant.has_arrived);
        let next = if extends > now { extends } else { running.deadline };
        Some(if has_arrival && cuts > now { next.min(cuts) } else { next })
    }

    /// Charges the open window, and ends, cuts or extends it.
    fn update_open_window(&mut self, now: u64, actions: &mut Vec<WindowAction<Id>>) {
        let Some(mut running) = self.running.take() else { return };
        let current = running.tenant;
        let tenant = &mut self.tenants[current];
        tenant.charge(&mut running, now, self.factor);
        let (id, seen) = (tenant.id, tenant.seen);
        let is_over = now >= running.deadline;
        if seen.has_drained() {
            if !is_over {
                // The window was returned before its end. No process may take it for open any more.
                actions.push(WindowAction::SetDeadline { tenant: id, deadline: now });
            }
            return;
        }
        if now >= running.deadline + running.drain_timeout {
            tenant.overrun = Some(running);
            return;
        }
        if seen.drained > 0 && !is_over {
            // One process has returned the window while others still use it. The change lets that
            // process use it again.
            actions.push(WindowAction::SetDeadline { tenant: id, deadline: running.deadline });
        }
        let other = self.next_except(now, Some(current));
        let may_stay = self.tenants[current].may_run(now);
        // No other tenant wants the GPU. The window is extended shortly before its end, so that
        // work goes on without a gap.
        if !is_over && now + QUANTUM / 4 >= running.deadline && other.is_none() && may_stay {
            running.deadline = now + QUANTUM;
            actions.push(WindowAction::SetDeadline { tenant: id, deadline: running.deadline });
        }
        let is_due = |other: usize| {
            self.tenants[other].has_arrived && self.tenants[other].order() <= self.tenants[current].order()
        };
        if !is_over && now >= running.since + MIN_WINDOW_NS && other.is_some_and(is_due) {
            running.deadline = now;
            actions.push(WindowAction::SetDeadline { tenant: id, deadline: now });
        }
        self.running = Some(running);
    }

    fn next(&self, now: u64) -> Option<usize> {
        self.next_except(now, None)
    }

    /// Returns the tenant that is next, ignoring `excluded`. The first tenant wins a tie.
    fn next_except(&self, now: u64, excluded: Option<usize>) -> Option<usize> {
        let all = self.tenants.iter().enumerate();
        all.filter(|(place, tenant)| Some(*place) != excluded && tenant.seen.wants() && tenant.may_run(now))
            .min_by_key(|(_, tenant)| tenant.order())
            .map(|(place, _)| place)
    }

    /// Returns the lowest virtual time of the wanting tenants, or else the highest of all tenants.
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

    /// Returns whether every wanting process has returned the window. Also true if no process wants
    /// the GPU.
    fn has_drained(self) -> bool {
        self.drained >= self.wanting
    }
}

impl Running {
    /// Returns for how many nanoseconds of the window the GPU was busy, by the tenant's report and
    /// within the bounds of [`MAX_SWITCH_NS`].
    fn busy(&self, now: u64, reported_busy: u64) -> u64 {
        let open = now.saturating_sub(self.since);
        let idle = open.saturating_sub(reported_busy.saturating_sub(self.reported_busy));
        open - idle.min(MAX_SWITCH_NS).min(open / 2)
    }
}

impl Share {
    /// Returns whether the tenant's account limits it.
    fn is_limited(self) -> bool {
        (1..100).contains(&self.compute_ceiling_percent)
    }
}

impl<Id> Tenant<Id> {
    fn may_run(&self, now: u64) -> bool {
        self.eligible_at() <= now
    }

    /// Returns the earliest time of the tenant's next window.
    fn eligible_at(&self) -> u64 {
        match &self.overrun {
            Some(window) => window.deadline + STUCK_TIMEOUT_NS,
            None if self.share.is_limited() => self.pacer.opens_at().0,
            None => 0,
        }
    }

    /// Returns the key by which tenants are ordered.
    ///
    /// A tenant whose work has overrun comes first once it is eligible, because its work may depend
    /// on work of its own that waits, and its virtual time keeps growing. Tenants with a share come
    /// before tenants without one.
    fn order(&self) -> (bool, bool, u64) {
        (self.overrun.is_none(), self.share.compute_percent == 0, self.virtual_time)
    }

    /// Charges the part of a window that has passed since the last charge.
    fn charge(&mut self, window: &mut Running, now: u64, factor: u64) {
        let all = window.busy(now, self.seen.busy_ns);
        let (from, busy) = (window.since + window.charged, all.saturating_sub(window.charged));
        window.charged += busy;
        self.waits_since = now;
        self.used += busy;
        self.virtual_time += busy * 100 / u64::from(self.share.compute_percent.max(1));
        let owed =
            self.pacer.opens_at().0.saturating_sub(now) / 100 * u64::from(self.share.compute_ceiling_percent);
        if self.share.is_limited() && owed < MAX_DEBT_NS {
            let counted = if self.share.by_throughput { busy * factor / 1_000 } else { busy };
            self.pacer.charge_after(
                Nanos(window.waited),
                Nanos(from),
                Nanos(from + counted),
                self.share.compute_ceiling_percent,
            );
        }
    }
}

#[cfg(test)]
#[path = "gpu_arbiter/tests.rs"]
mod tests;
