//! Decides which tenant gets the next window on one GPU.
//!
//! A share is a percentage of the GPU's time. Each tenant has three accounts (see [`pacer::Pacer`]) and a virtual
//! time.
//! - *Ceiling*: the time for which the GPU was busy for the tenant. It gets no window while the account is ahead of
//!   real time.
//! - *Occupancy*: the time for which the tenant kept the GPU from others, whether it was busy or not. While it is ahead
//!   of what the ceiling allows, the tenant only borrows time: it comes last, and its window ends when a tenant that
//!   does not borrow may claim it.
//! - *Guarantee*: the same time, compared with the guaranteed share. While it is ahead, the tenant's window is cut for
//!   a tenant that arrives and has not had its share. So a cut never takes what the share of a tenant pays for.
//! - The *virtual time* is the time for which the tenant kept the GPU from others, divided by its share. The tenant
//!   with the lowest virtual time is next. A tenant that wants nothing for a while keeps the distance to the others
//!   that it had before, so a pause neither costs nor earns it anything.
//!
//! Only the tenant knows for how long the GPU was busy for it, so a report is a claim. The ceiling believes it. The
//! occupancy and the guarantee believe reported idle time only within the bounds of `IdleAllowance`, so that a slow
//! switch does not cost the tenant its share, and the virtual time believes nothing. So a tenant that lies may get
//! time that others leave, but no time that others want. The agent compares claims with the driver's figures.

mod idle_allowance;
mod tenant;

use tessera_throttle::{back_pressure, pacer};

use self::idle_allowance::IdleAllowance;
use self::tenant::{Cut, Running, Tenant};

/// Length of a window in nanoseconds.
const QUANTUM: u64 = pacer::QUANTUM.0;

/// Time in nanoseconds before the end of a window at which it is extended if no other tenant may get one.
const EXTENSION_MARGIN_NS: u64 = QUANTUM / 4;

/// The same if no other tenant wants the GPU: the program may always queue so much.
const EXTENSION_MARGIN_ALONE_NS: u64 = back_pressure::DEEP_QUEUE_LIMIT.0;

/// Time in nanoseconds for which a tenant that came back from idle is expected to come back again.
const RETURN_NS: u64 = 1_000_000_000;

/// Shortest window in nanoseconds. A window may be cut for a tenant that arrives from idle, but
/// only after this time.
const MIN_WINDOW_NS: u64 = 1_000_000;

/// Longest idle time in nanoseconds of a cut window that the tenant for which it was cut pays to the tenant
/// that lost the window.
const MAX_CUT_COST_NS: u64 = 1_000_000;

/// Time in nanoseconds after the end of a window at which a tenant loses the window even though its
/// work still runs. The tenant is charged until its work has ended.
const DRAIN_TIMEOUT_NS: u64 = 250_000_000;

/// The same for a tenant that only borrowed the window. A long kernel that began in the window ends in that time.
const BORROWED_DRAIN_NS: u64 = QUANTUM;

/// Time in nanoseconds after which a tenant whose work still runs gets another window. Its running
/// work may depend on work that waits for a window.
const STUCK_TIMEOUT_NS: u64 = 2_500_000_000;

/// Length in nanoseconds of such a window. Launches that wait at the gate take far less.
const STUCK_WINDOW_NS: u64 = 5_000_000;

/// Longest time in nanoseconds for which the work of all tenants together may block others after the
/// end of windows, beyond what their shares have paid for. It is less than 2 % of ten seconds.
const MAX_OVERSTAYED_NS: u64 = 150_000_000;

/// Time in nanoseconds for which the work of a tenant may block others after the end of windows, even if
/// other tenants have used up [`MAX_OVERSTAYED_NS`].
const MIN_OVERSTAYED_NS: u64 = 20_000_000;

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
pub struct WindowAction<Id> {
    /// The tenant that the window belongs to.
    pub tenant: Id,
    /// True for a new window, false for a change of the open one.
    pub is_new: bool,
    /// End of the window in nanoseconds on the monotonic clock.
    pub deadline: u64,
    /// Work in nanoseconds that the tenant may have queued.
    pub queue_limit_ns: u64,
}

/// The tenants of one GPU and the window that is open.
#[derive(Debug)]
pub struct GpuArbiter<Id> {
    tenants: Vec<Tenant<Id>>,
    running: Option<Running>,
    /// Power factor in thousandths, by which busy time is multiplied for shares of throughput.
    factor: u64,
}

/// The time and windows that a tenant has used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WindowUsage {
    /// Nanoseconds for which its windows were open.
    pub open_ns: u64,
    /// Nanoseconds of them for which the GPU was busy, as the tenant reports.
    pub busy_ns: u64,
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
            Some(tenant) => tenant.set_share(share),
            None => self.tenants.push(Tenant::new(id, share, self.least_virtual_time())),
        }
    }

    /// Sets whether all processes of a tenant are stopped, by the kernel's word. Work that a stopped tenant had queued
    /// ends, but the tenant cannot say so. It owes nothing for the time in which it is stopped.
    pub fn set_stopped(&mut self, id: Id, is_stopped: bool) {
        if let Some(tenant) = self.tenants.iter_mut().find(|tenant| tenant.id == id) {
            tenant.is_stopped = is_stopped;
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
        self.tenants.iter().map(|tenant| tenant.usage.busy_ns).sum()
    }

    /// Removes a tenant and its window.
    pub fn remove(&mut self, id: Id) {
        let Some(place) = self.tenants.iter().position(|tenant| tenant.id == id) else { return };
        self.tenants.remove(place);
        self.running = self.running.take().filter(|running| running.tenant != place).map(|mut running| {
            running.tenant -= usize::from(running.tenant > place);
            let others = running.cut_for.filter(|&other| other != place);
            running.cut_for = others.map(|other| other - usize::from(other > place));
            running
        });
    }

    /// Returns what a tenant has used so far.
    #[must_use]
    pub fn usage(&self, id: Id) -> WindowUsage {
        let tenant = self.tenants.iter().find(|tenant| tenant.id == id);
        tenant.map(|tenant| tenant.usage).unwrap_or_default()
    }

    /// Charges the open window and decides about the next one, from the current reports of all
    /// tenants.
    pub fn step(&mut self, now: u64, seen: impl Fn(Id) -> TenantReport) -> Vec<WindowAction<Id>> {
        let least = self.least_virtual_time();
        let running = self.tenants.iter().filter(|tenant| tenant.seen.wants() && !tenant.is_stopped);
        let least_running = running.map(|tenant| tenant.virtual_time).min().unwrap_or(0);
        for tenant in &mut self.tenants {
            let before = std::mem::replace(&mut tenant.seen, seen(tenant.id));
            tenant.forget_overstayed(now);
            match (before.wants(), tenant.seen.wants()) {
                (false, true) => tenant.arrive(now, least),
                (true, false) => tenant.left_at = now,
                _ => {}
            }
            if let Some(mut window) = tenant.overrun.take() {
                if tenant.is_stopped {
                    tenant.forgive(&mut window, now, least_running);
                } else {
                    tenant.charge(&mut window, now, self.factor);
                }
                let highest = least + MAX_DEBT_NS * 100 / u64::from(tenant.share.compute_percent.max(1));
                tenant.virtual_time = tenant.virtual_time.min(highest);
                tenant.overrun = Some(window).filter(|_| !tenant.seen.has_drained());
            }
        }
        let mut actions = Vec::new();
        let cut = self.update_open_window(now, &mut actions);
        if self.running.is_none() {
            self.open_window(now, cut, &mut actions);
        }
        let wanting = self.tenants.iter().filter(|tenant| tenant.seen.wants());
        let least = wanting.map(|tenant| tenant.virtual_time).min().unwrap_or(0);
        let leaving = self.tenants.iter_mut().filter(|tenant| !tenant.seen.wants() && tenant.left_at == now);
        leaving.for_each(|tenant| tenant.keep_lag(least));
        actions
    }

    /// Opens a window for the tenant for which the last one was cut, or else for the one that is next.
    fn open_window(&mut self, now: u64, cut: Option<Cut>, actions: &mut Vec<WindowAction<Id>>) {
        let winner = cut.as_ref().map(|cut| cut.winner).filter(|&winner| self.tenants[winner].may_open(now));
        if let Some(next) = winner.or_else(|| self.next_except(now, None)) {
            let queue_limit_ns = self.queue_limit_ns(next, now);
            let claimed_at = self.claimed_at(next);
            let tenant = &mut self.tenants[next];
            let mut window = tenant.open(next, now, queue_limit_ns);
            window.end_for_claim(claimed_at);
            actions.push(window.action(tenant.id, true));
            self.running = Some(window);
        }
        // The payment is due even if the tenant for which the window was cut wants nothing any more.
        if let Some(Cut { loser, winner, idle }) = cut {
            self.tenants[winner].charge_occupied(idle);
            self.tenants[loser].compensate(idle);
        }
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
        // A tenant that is not limited yet by its ceiling is asked a second time.
        let margins = [self.extension_margin_ns(running.tenant), EXTENSION_MARGIN_NS, 0];
        let next =
            margins.map(|margin| running.deadline.saturating_sub(margin)).into_iter().find(|&at| at > now);
        let next = next.unwrap_or(running.deadline);
        let current = &self.tenants[running.tenant];
        let waiting = self.tenants.iter().enumerate().filter(|(place, tenant)| {
            let may_cut = tenant.has_arrived || running.is_borrowed && *place != running.tenant;
            may_cut && tenant.seen.wants()
        });
        let cuts = waiting.map(|(_, tenant)| {
            current
                .gives_way_at(running, now, tenant)
                .max(tenant.eligible_at())
                .max(running.since + MIN_WINDOW_NS)
        });
        Some(cuts.filter(|&at| at > now).fold(next, u64::min))
    }

    /// Charges the open window, and ends, cuts or extends it. Returns what is to be paid if a window that was
    /// cut has ended.
    fn update_open_window(&mut self, now: u64, actions: &mut Vec<WindowAction<Id>>) -> Option<Cut> {
        let mut running = self.running.take()?;
        let current = running.tenant;
        let tenant = &mut self.tenants[current];
        tenant.charge(&mut running, now, self.factor);
        let (id, seen) = (tenant.id, tenant.seen);
        let is_over = now >= running.deadline;
        if seen.has_drained() {
            if !is_over {
                // The window was returned before its end. No process may take it for open any more.
                running.deadline = now;
                actions.push(running.action(id, false));
            }
            return running.cut();
        }
        if is_over && self.next_except(now, Some(current)).is_some() {
            let begin = running.deadline.max(running.stepped_at);
            self.tenants[current].overstayed += now.saturating_sub(begin);
        }
        running.stepped_at = now;
        let has_borrowed_enough = running.is_borrowed && now >= running.deadline + BORROWED_DRAIN_NS;
        let is_cut_short = has_borrowed_enough || running.has_deep_queue(now);
        let must_leave = is_over && (is_cut_short || !self.may_overstay(current));
        if now >= running.deadline + running.drain_timeout || must_leave {
            let cut = running.cut();
            running.virtual_time = self.tenants[current].virtual_time;
            self.tenants[current].overrun = Some(running);
            return cut;
        }
        // One process has returned the window while others still use it. The change lets that process use it
        // again.
        let mut is_changed = seen.drained > 0 && !is_over;
        let queue_limit_ns = self.queue_limit_ns(current, now);
        if !is_over && queue_limit_ns != running.queue_limit_ns {
            if queue_limit_ns < running.queue_limit_ns {
                running.shortened_at = now;
            }
            (running.queue_limit_ns, is_changed) = (queue_limit_ns, true);
        }
        let other = self.next_except(now, Some(current));
        let may_stay = self.tenants[current].may_run(now);
        // No other tenant wants the GPU. The window is extended shortly before its end, so that
        // work goes on without a gap.
        let margin = self.extension_margin_ns(current);
        if !is_over && now + margin >= running.deadline && other.is_none() && may_stay {
            let before = running.deadline;
            (running.deadline, running.is_borrowed) =
                (now + margin + QUANTUM, self.tenants[current].is_over(now));
            running.end_for_claim(self.claimed_at(current));
            running.deadline = running.deadline.max(before);
            is_changed |= running.deadline > before;
        }
        let is_due = |other: usize| {
            let (current, other) = (&self.tenants[current], &self.tenants[other]);
            (other.has_arrived || running.is_borrowed && !other.is_over(now))
                && current.gives_way_at(&running, now, other) <= now
        };
        if !is_over
            && now >= running.since + MIN_WINDOW_NS
            && let Some(other) = other.filter(|&other| is_due(other))
        {
            (running.deadline, running.cut_for, is_changed) = (now, Some(other), true);
        }
        if is_changed {
            actions.push(running.action(id, false));
        }
        self.running = Some(running);
        None
    }

    /// Returns whether the work of a tenant may block others after the end of its window.
    fn may_overstay(&self, tenant: usize) -> bool {
        self.tenants[tenant].overstayed <= MIN_OVERSTAYED_NS
            || self.tenants.iter().map(|tenant| tenant.overstayed).sum::<u64>() <= MAX_OVERSTAYED_NS
    }

    /// Returns the time at which a tenant that waits for its own account takes a borrowed window from `borrower`.
    fn claimed_at(&self, borrower: usize) -> u64 {
        let others = self.tenants.iter().enumerate().filter(|(place, _)| *place != borrower);
        let waiting = others.filter(|(_, other)| other.seen.wants());
        waiting.map(|(_, other)| other.within_ceiling_at()).min().unwrap_or(u64::MAX)
    }

    /// Returns the time before the end of a tenant's window at which it may be extended.
    fn extension_margin_ns(&self, tenant: usize) -> u64 {
        let mut others = self.tenants.iter().enumerate().filter(|(place, _)| *place != tenant);
        let is_alone = !others.any(|(_, other)| other.seen.wants());
        if is_alone { EXTENSION_MARGIN_ALONE_NS } else { EXTENSION_MARGIN_NS }
    }

    /// Returns how much work a tenant may have queued. A deep queue lets its program do other things. A tenant that
    /// comes back from idle again and again waits for what is queued, so beside one queues are short.
    fn queue_limit_ns(&self, tenant: usize, now: u64) -> u64 {
        let others = self.tenants.iter().enumerate().filter(|(place, _)| *place != tenant);
        let mut returning = others.filter(|(_, other)| now < other.arrived_at + RETURN_NS);
        let is_deep = returning.next().is_none();
        (if is_deep { back_pressure::DEEP_QUEUE_LIMIT } else { back_pressure::QUEUE_LIMIT }).0
    }

    /// Returns the tenant that is next, ignoring `excluded`. The first tenant wins a tie.
    fn next_except(&self, now: u64, excluded: Option<usize>) -> Option<usize> {
        let all = self.tenants.iter().enumerate();
        all.filter(|(place, tenant)| Some(*place) != excluded && tenant.may_open(now))
            .min_by_key(|(_, tenant)| tenant.order(now))
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

impl Share {
    /// Returns whether the tenant's account limits it.
    fn is_limited(self) -> bool {
        (1..100).contains(&self.compute_ceiling_percent)
    }
}

#[cfg(test)]
#[path = "gpu_arbiter/tests.rs"]
mod tests;
