//! Who goes next on one card.
//!
//! Two numbers per tenant. The *account* (see [`Pacer`]) holds it to its ceiling: it may go when real time has caught
//! up. *Virtual time*, busy time by share, orders those who may go: the one that had least for its share is next. For
//! hard shares both say the same; for soft ones the second decides who grows into what others leave.

use tessera_limits::pacer::{Pacer, QUANTUM};

/// A window is cut for a tenant that arrives from idle, but not before this.
const SHORTEST: u64 = 1_000_000;

/// What passes between the opening of a window and its first kernel, and between its last kernel and our hearing of it: two
/// wake-ups each way. The card is idle then, and that is not the tenant's time. Measured on an H200, 0.3 to 0.4 ms.
const SWITCH: u64 = 300_000;

/// A tenant that has not drained this long after its window loses it all the same; it is charged until it has.
const OVERRUN: u64 = 250_000_000;

/// What one container may use of the card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// Percent guaranteed; 0: what others leave.
    pub cores: u32,
    /// Percent at most.
    pub ceiling: u32,
    /// Whether a percentage means throughput: then time counts by the card's power factor.
    pub by_throughput: bool,
}

/// What a container tells.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// It has work running or waiting.
    pub wants: bool,
    /// Nothing of its window is running any more.
    pub has_drained: bool,
}

/// What to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Act<Id> {
    /// A new window for a tenant.
    Open {
        /// Whose.
        tenant: Id,
        /// Until when.
        deadline: u64,
    },
    /// The window goes on, or ends now.
    Move {
        /// Whose.
        tenant: Id,
        /// Until when.
        deadline: u64,
    },
}

/// The tenants of one card.
#[derive(Debug)]
pub struct CardArbiter<Id> {
    tenants: Vec<Tenant<Id>>,
    running: Option<Running>,
    /// Thousandths by which time counts for throughput.
    factor: u64,
}

#[derive(Debug)]
struct Tenant<Id> {
    id: Id,
    share: Share,
    seen: Seen,
    /// It began to want while somebody else was running.
    has_arrived: bool,
    /// Since when it wants and may go, and others keep it waiting.
    kept_since: Option<u64>,
    pacer: Pacer,
    virtual_time: u64,
    used: u64,
    windows: u64,
}

/// The window that is open, or being drained.
#[derive(Debug)]
struct Running {
    tenant: usize,
    since: u64,
    charged: u64,
    deadline: u64,
    /// How long others had kept the tenant waiting.
    kept: u64,
}

/// What a tenant has had.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Used {
    /// Nanoseconds of the card.
    pub time: u64,
    /// Windows.
    pub windows: u64,
}

impl<Id> Default for CardArbiter<Id> {
    fn default() -> Self {
        Self { tenants: Vec::new(), running: None, factor: 1_000 }
    }
}

impl<Id: Copy + PartialEq> CardArbiter<Id> {
    /// Takes a tenant in, or changes its share.
    pub fn set(&mut self, id: Id, share: Share) {
        match self.tenants.iter_mut().find(|tenant| tenant.id == id) {
            Some(tenant) if tenant.share == share => {}
            // Debts of another share would be too much or too little.
            Some(tenant) => (tenant.share, tenant.pacer) = (share, Pacer::default()),
            None => self.tenants.push(Tenant {
                id,
                share,
                seen: Seen::default(),
                has_arrived: false,
                kept_since: None,
                pacer: Pacer::default(),
                virtual_time: self.least_virtual_time(),
                used: 0,
                windows: 0,
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

    /// Nanoseconds of the card that all tenants have had.
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
    pub fn used(&self, id: Id) -> Used {
        let tenant = self.tenants.iter().find(|tenant| tenant.id == id);
        tenant.map_or_else(Used::default, |tenant| Used { time: tenant.used, windows: tenant.windows })
    }

    /// Decides, from what is seen of each tenant.
    pub fn step(&mut self, now: u64, seen: impl Fn(Id) -> Seen) -> Vec<Act<Id>> {
        let least = self.least_virtual_time();
        for tenant in &mut self.tenants {
            let before = std::mem::replace(&mut tenant.seen, seen(tenant.id));
            if tenant.seen.wants && !before.wants {
                // Time it did not want is not owed to it.
                tenant.virtual_time = tenant.virtual_time.max(least);
                tenant.has_arrived = true;
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
            let kept = tenant.kept_since.take().map_or(0, |since| now - since);
            acts.push(Act::Open { tenant: tenant.id, deadline });
            self.running = Some(Running { tenant: next, since: now, charged: now + SWITCH, deadline, kept });
        }
        let running = self.running.as_ref().map(|running| running.tenant);
        for (place, tenant) in self.tenants.iter_mut().enumerate() {
            let is_kept = Some(place) != running && tenant.seen.wants && tenant.may_go(now);
            tenant.kept_since = is_kept.then(|| tenant.kept_since.unwrap_or(now));
        }
        acts
    }

    /// When to look again though nothing is heard; none: when somebody is heard.
    #[must_use]
    pub fn next_look(&self, now: u64) -> Option<u64> {
        let Some(running) = &self.running else {
            let wanting = self.tenants.iter().filter(|tenant| tenant.seen.wants);
            return wanting.map(|tenant| tenant.pacer.opens_at().max(now)).min();
        };
        if now >= running.deadline {
            // Whoever dies while it drains is not heard.
            return Some(now + SHORTEST);
        }
        let lengthens = running.deadline - QUANTUM / 4;
        let cuts = running.since + SHORTEST;
        let waits = self.tenants.iter().any(|tenant| tenant.has_arrived);
        let next = if lengthens > now { lengthens } else { running.deadline };
        Some(if waits && cuts > now { next.min(cuts) } else { next })
    }

    /// Charges the window that is open; ends, cuts or lengthens it.
    fn follow(&mut self, now: u64, acts: &mut Vec<Act<Id>>) {
        let Some(mut running) = self.running.take() else { return };
        let current = running.tenant;
        self.tenants[current].charge(running.kept, running.charged, now, self.factor);
        running.charged = running.charged.max(now);
        let tenant = &self.tenants[current];
        let (id, wants, has_drained) = (tenant.id, tenant.seen.wants, tenant.seen.has_drained);
        if !wants {
            acts.push(Act::Move { tenant: id, deadline: now });
            return;
        }
        let is_over = now >= running.deadline;
        if is_over && (has_drained || now >= running.deadline + OVERRUN) {
            return;
        }
        let other = self.next_but(now, Some(current));
        let may_stay = self.tenants[current].may_go(now);
        // Nobody else: go on without a break, shortly before the end so that there is none.
        if !is_over && now + QUANTUM / 4 >= running.deadline && other.is_none() && may_stay {
            running.deadline = now + QUANTUM;
            acts.push(Act::Move { tenant: id, deadline: running.deadline });
        }
        let is_due = |other: usize| {
            self.tenants[other].has_arrived && self.tenants[other].order() <= self.tenants[current].order()
        };
        if !is_over && now >= running.since + SHORTEST && other.is_some_and(is_due) {
            running.deadline = now;
            acts.push(Act::Move { tenant: id, deadline: now });
        }
        self.running = Some(running);
    }

    fn next(&self, now: u64) -> Option<usize> {
        self.next_but(now, None)
    }

    /// Who goes next, leaving one out. Ties: the first.
    fn next_but(&self, now: u64, but: Option<usize>) -> Option<usize> {
        let all = self.tenants.iter().enumerate();
        all.filter(|(place, tenant)| Some(*place) != but && tenant.seen.wants && tenant.may_go(now))
            .min_by_key(|(_, tenant)| tenant.order())
            .map(|(place, _)| place)
    }

    /// Where those who want are.
    fn least_virtual_time(&self) -> u64 {
        let wanting = self.tenants.iter().filter(|tenant| tenant.seen.wants);
        let least = wanting.map(|tenant| tenant.virtual_time).min();
        least.or_else(|| self.tenants.iter().map(|tenant| tenant.virtual_time).max()).unwrap_or(0)
    }
}

impl Share {
    /// Whether there is a ceiling to hold it to.
    fn is_limited(self) -> bool {
        (1..100).contains(&self.ceiling)
    }
}

impl<Id> Tenant<Id> {
    fn may_go(&self, now: u64) -> bool {
        !self.share.is_limited() || self.pacer.opens_at() <= now
    }

    /// Shares go before those who have none.
    fn order(&self) -> (bool, u64) {
        (self.share.cores == 0, self.virtual_time)
    }

    fn charge(&mut self, kept: u64, from: u64, to: u64, factor: u64) {
        let busy = to.saturating_sub(from);
        self.used += busy;
        self.virtual_time += busy * 100 / u64::from(self.share.cores.max(1));
        if self.share.is_limited() {
            let counted = if self.share.by_throughput { busy * factor / 1_000 } else { busy };
            self.pacer.charge_after(kept, from, from + counted, self.share.ceiling);
        }
    }
}

#[cfg(test)]
#[path = "card/tests.rs"]
mod tests;
