//! Loans of memory: a container may use more of a GPU than it was granted, up to the limit of its pod, while no pod
//! was granted that memory.
//!
//! - Only memory that no pod was granted is lent, so the limits of all containers together never exceed the GPU.
//! - A pod that is bound to the node takes its memory from loans at once: the limits of borrowers fall before a
//!   container of the new pod starts. Memory that is lent and not in use goes first.
//! - The library refuses further memory to a borrower over its limit, but cannot take memory back. A container of
//!   the new pod therefore starts only when samples show that the borrowers hold no more than is left.
//! - Borrowers that do not return memory in time are killed, as the kernel kills processes that lack memory.
//!
//! What containers use is the greater of the driver's count and the container's own account. A container that writes
//! a wrong account can only keep loans from other borrowers.

mod division;

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use tessera_core::{
    gpu::{Gpu, GpuUuid},
    grant::Hold,
    node::NodeState,
    units::{GpuIndex, MiB, PodUid},
};
use tessera_limits::{Bytes, UuidBytes};
use tessera_wire::{foreign::objects::Pod, tessera::memory_limit};

use self::division::{Share, divide, sum};
use super::{
    Action, Agent, CallError, ContainerLimits, EventTime, GpuProcess, PodContainer, ProcessState,
    UsageSample, Warning, holdings::Source, pods::display_name, usage_check::TOLERATED_BYTES,
};

/// Part of a GPU's memory that is never lent, as a divisor: the driver keeps some memory for itself, and containers
/// may use a little more than they have charged.
const HELD_BACK: u64 = 32;

/// Time for which borrowers may hold memory that other pods were granted before their processes are killed.
pub(super) const RETURN_TIME: Duration = Duration::from_secs(10);

/// Number of samples after which the use of a GPU is known to follow a lowered limit. The first sample may have begun
/// before the limit was written.
const CONFIRMING_SAMPLES: u32 = 2;

/// What is known about borrowed memory.
#[derive(Debug, Default)]
pub(super) struct Loans {
    /// Memory that containers use, by the last sample that could tell.
    used: BTreeMap<(PodContainer, UuidBytes), Used>,
    /// GPUs on which containers may borrow memory.
    gpus: BTreeMap<UuidBytes, GpuLoans>,
    /// Pods whose containers may have borrowed memory, even if their annotations no longer allow it.
    candidates: BTreeSet<PodUid>,
    /// Number of samples since the agent started, up to [`CONFIRMING_SAMPLES`].
    samples: u32,
}

/// Memory of a GPU that a container uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Used {
    /// Memory that the container's processes have charged. A container can return it.
    charged: Bytes,
    /// The greater of the charged memory and the driver's count.
    total: Bytes,
}

/// Loans of one GPU.
#[derive(Debug, Default)]
struct GpuLoans {
    /// Number of samples since a limit was lowered, up to [`CONFIRMING_SAMPLES`].
    samples: u32,
    /// Time since which borrowers hold memory that other pods were granted.
    short_since: Option<Duration>,
    /// Borrowers that were asked to return memory, and whether they were killed.
    asked: BTreeMap<PodContainer, bool>,
}

/// A container that may borrow memory of a GPU, or has done so.
#[derive(Clone, Debug)]
struct Borrower {
    container: PodContainer,
    guarantee: MiB,
    share: Share,
    /// Charged memory beyond the guarantee.
    charged: MiB,
}

impl Borrower {
    /// Returns whether the container has charged more than its limit, or uses more by the driver's count. The driver
    /// may have added some memory that the container cannot return.
    fn is_over(&self) -> bool {
        let loan = self.share.loan;
        self.charged > loan || self.share.used.0 > loan.0.saturating_add(TOLERATED_BYTES >> 20)
    }
}

/// Borrowers of one GPU and the memory that they may share.
struct GpuBorrowers {
    index: GpuIndex,
    pool: MiB,
    borrowers: Vec<Borrower>,
}

impl GpuBorrowers {
    /// Returns whether borrowers hold memory that other pods were granted.
    fn is_short(&self) -> bool {
        let used: Vec<MiB> = self.borrowers.iter().map(|borrower| borrower.share.used).collect();
        sum(&used) > self.pool.0 && self.borrowers.iter().any(Borrower::is_over)
    }
}

impl Loans {
    /// Takes over the grants of an earlier agent, which may have lent memory to any of them.
    pub(super) fn found(&mut self, pods: &BTreeSet<PodUid>) {
        self.candidates.extend(pods.iter().cloned());
    }
}

impl Agent {
    /// Divides the memory that no pod was granted among the containers that may borrow it.
    pub(super) fn lend(&mut self, actions: &mut Vec<Action>) {
        for (uuid, gpu) in self.borrowers() {
            let samples = self.loans.samples;
            let known =
                self.loans.gpus.entry(uuid).or_insert_with(|| GpuLoans { samples, ..GpuLoans::default() });
            let shares: Vec<Share> = gpu.borrowers.iter().map(|borrower| borrower.share).collect();
            let loans = divide(gpu.pool, &shares, known.samples >= CONFIRMING_SAMPLES);
            for (borrower, loan) in gpu.borrowers.iter().zip(loans) {
                if loan < borrower.share.loan {
                    known.samples = 0;
                }
                if loan != borrower.share.loan {
                    let memory = Bytes::from_mib((borrower.guarantee + loan).0);
                    self.grants.set_memory(&borrower.container, uuid, memory, actions);
                }
            }
        }
    }

    /// Takes in a sample: corrects the loans, and has borrowers killed that do not return what other pods were granted.
    pub(super) fn follow_loans(&mut self, now: EventTime, sample: &UsageSample, actions: &mut Vec<Action>) {
        let lent = self.borrowers();
        self.loans.samples = (self.loans.samples + 1).min(CONFIRMING_SAMPLES);
        self.loans.gpus.retain(|uuid, _| lent.contains_key(uuid));
        let pods = &self.pods;
        self.loans.candidates.retain(|uid| !pods.is_complete() || pods.get(uid).is_some());
        for gpu in self.loans.gpus.values_mut() {
            gpu.samples = (gpu.samples + 1).min(CONFIRMING_SAMPLES);
        }
        let mut used = BTreeMap::new();
        for (uuid, gpu) in &lent {
            for Borrower { container, .. } in &gpu.borrowers {
                let key = (container.clone(), *uuid);
                let known = self.grants.limits_of(container).and_then(|limits| use_of(sample, limits, *uuid));
                let known = known.or_else(|| self.loans.used.get(&key).copied());
                used.extend(known.map(|known| (key, known)));
            }
        }
        self.loans.used = used;
        self.lend(actions);
        for (uuid, gpu) in self.borrowers() {
            self.reclaim(now, uuid, &gpu, sample, actions);
        }
    }

    /// Returns why a container with these limits must wait for memory that other containers have borrowed, or `None`
    /// if it may start.
    pub(super) fn borrowed_memory(&mut self, limits: &[ContainerLimits]) -> Option<CallError> {
        let lent = self.borrowers();
        let wanted: BTreeSet<UuidBytes> =
            limits.iter().flat_map(|limits| limits.gpus.iter().map(|gpu| gpu.uuid)).collect();
        let own: BTreeSet<PodContainer> = limits.iter().map(ContainerLimits::key).collect();
        let waits = |(uuid, gpu): &(&UuidBytes, &GpuBorrowers)| {
            let is_confirmed =
                self.loans.gpus.get(uuid).is_none_or(|known| known.samples >= CONFIRMING_SAMPLES);
            let is_unwritten = |borrower: &Borrower| self.grants.is_unwritten(&borrower.container);
            wanted.contains(uuid)
                && gpu.borrowers.iter().any(|borrower| !own.contains(&borrower.container))
                && (!is_confirmed || gpu.is_short() || gpu.borrowers.iter().any(is_unwritten))
        };
        let (_, gpu) = lent.iter().find(waits)?;
        let most = gpu.borrowers.iter().max_by_key(|borrower| borrower.share.used)?;
        let pod = self.pods.get(&most.container.0).map(display_name).unwrap_or_default();
        Some(CallError::MemoryBorrowed { gpu: gpu.index, pod })
    }

    /// Asks borrowers of a GPU to return memory, and kills them if they do not.
    fn reclaim(
        &mut self,
        now: EventTime,
        uuid: UuidBytes,
        gpu: &GpuBorrowers,
        sample: &UsageSample,
        actions: &mut Vec<Action>,
    ) {
        let Some(known) = self.loans.gpus.get_mut(&uuid) else { return };
        if !gpu.is_short() {
            (known.short_since, known.asked) = (None, BTreeMap::new());
            return;
        }
        let is_late = now.elapsed >= *known.short_since.get_or_insert(now.elapsed) + RETURN_TIME;
        for borrower in gpu.borrowers.iter().filter(|borrower| borrower.is_over()) {
            let (uid, container) = &borrower.container;
            let was_killed = known.asked.insert(borrower.container.clone(), is_late);
            if is_late {
                let is_its = |process: &&GpuProcess| {
                    process.container == borrower.container
                        && process.state != ProcessState::Ended
                        && UuidBytes::parse(&process.gpu.0) == Some(uuid)
                };
                let kill = |process: &GpuProcess| Action::Kill { pid: process.pid, started: process.started };
                actions.extend(sample.processes.iter().filter(is_its).map(kill));
            }
            if was_killed == Some(is_late) {
                continue;
            }
            let Some(pod) = self.pods.get(uid) else { continue };
            let (used, lent) = (borrower.share.used, borrower.share.loan);
            let (reason, end) = match is_late {
                false => {
                    let seconds = RETURN_TIME.as_secs();
                    (
                        "BorrowedMemoryClaimed",
                        format!("it is killed unless it returns the rest within {seconds} s"),
                    )
                }
                true => ("BorrowedMemoryReclaimed", "it did not return the rest and is killed".to_owned()),
            };
            let message = format!(
                "container {container} has borrowed {used} of GPU {}, of which other pods now own all but {lent}; {end}",
                gpu.index
            );
            let warning = Warning::new("a container holds borrowed GPU memory that another pod was granted");
            actions.push(Action::Warn(warning.pod(pod).container(container).detail(message.clone())));
            let (namespace, name) = (pod.metadata.namespace.clone(), pod.metadata.name.clone());
            actions.push(Action::RecordPodEvent { uid: uid.clone(), namespace, name, reason, message });
        }
    }

    /// Returns the borrowers of all GPUs that have any.
    fn borrowers(&mut self) -> BTreeMap<UuidBytes, GpuBorrowers> {
        let mut lent: BTreeMap<UuidBytes, GpuBorrowers> = BTreeMap::new();
        let may_lend = self.settings.isolation.lend_memory;
        let annotated =
            |pod: &Pod| memory_limit::parse(&pod.metadata.annotations).ok().flatten().filter(|_| may_lend);
        let Some(gpus) = self.inventory.gpus() else { return lent };
        for (uid, pod) in self.pods.active() {
            let limit = annotated(pod);
            if limit.is_none() && !self.loans.candidates.contains(uid) {
                continue;
            }
            for held in self.holdings().of_pod(uid, pod) {
                let container = (uid.clone(), held.grant.container.clone());
                let Some(limits) = self.grants.limits_of(&container) else { continue };
                // The limits of a container that has not been admitted yet are those of an earlier one.
                if held.source == Source::Annotated {
                    continue;
                }
                for (index, hold) in &held.grant.holds {
                    let (Hold::Share { memory: guarantee, .. }, Some(gpu)) = (*hold, gpus.node.gpu(*index))
                    else {
                        continue;
                    };
                    let Some(uuid) = UuidBytes::parse(&gpu.uuid.0) else { continue };
                    let Some(written) = limits.gpus.iter().find(|limit| limit.uuid == uuid) else { continue };
                    let beyond = |bytes: Bytes| MiB((bytes.0 >> 20).saturating_sub(guarantee.0));
                    let loan = beyond(written.memory);
                    // Before the first sample, a container is taken to use all that it may.
                    let used = self.loans.used.get(&(container.clone(), uuid)).copied();
                    let used = used.unwrap_or(Used { charged: written.memory, total: written.memory });
                    let share = Share {
                        headroom: limit.unwrap_or_default().saturating_sub(guarantee),
                        loan,
                        used: beyond(used.total),
                    };
                    let charged = beyond(used.charged);
                    if share.headroom > MiB::ZERO || share.loan > MiB::ZERO {
                        let on_gpu = GpuBorrowers { index: *index, pool: MiB::ZERO, borrowers: Vec::new() };
                        let on_gpu = lent.entry(uuid).or_insert(on_gpu);
                        on_gpu.borrowers.push(Borrower {
                            container: container.clone(),
                            guarantee,
                            share,
                            charged,
                        });
                    }
                }
            }
        }
        if !lent.is_empty() {
            let borrowers = lent.values().flat_map(|gpu| gpu.borrowers.iter());
            self.loans.candidates.extend(borrowers.map(|borrower| borrower.container.0.clone()));
            let ledger = self.ledger();
            let state = ledger.node(&self.settings.node);
            for gpu in lent.values_mut() {
                gpu.pool = state.map(|state| pool(state, gpu.index)).unwrap_or_default();
            }
        }
        lent
    }
}

/// Returns the memory of a GPU that may be lent: what no pod was granted, without what is held back.
fn pool(node: &NodeState, index: GpuIndex) -> MiB {
    let total = node.node().gpu(index).map(|gpu: &Gpu| gpu.memory).unwrap_or_default();
    node.room(index).memory.saturating_sub(MiB(total.0.div_ceil(HELD_BACK)))
}

/// Returns the memory of a GPU that a container uses, or `None` if neither the driver nor the account can tell.
fn use_of(sample: &UsageSample, limits: &ContainerLimits, uuid: UuidBytes) -> Option<Used> {
    let container = limits.key();
    let is_gpu = |gpu: &GpuUuid| UuidBytes::parse(&gpu.0) == Some(uuid);
    let alive = sample.processes.iter().filter(|process| {
        process.container == container && is_gpu(&process.gpu) && process.state != ProcessState::Ended
    });
    let by_driver = alive.map(|process| process.bytes).sum::<Option<u64>>();
    let by_driver = by_driver.filter(|_| sample.sampled_gpus.iter().any(is_gpu));
    let place = limits.gpus.iter().position(|gpu| gpu.uuid == uuid)?;
    // A container without processes has no entry.
    let account = sample.accounts.iter().find(|account| account.container == container);
    let by_account = account.map_or(Some(0), |account| account.held.get(place).copied().flatten());
    let total = by_driver.max(by_account)?;
    Some(Used { charged: Bytes(by_account.unwrap_or_default()), total: Bytes(total) })
}
