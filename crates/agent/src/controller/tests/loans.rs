//! Loans of memory: containers that may use more of a GPU than they were granted.

use std::collections::BTreeMap;

use tessera_core::units::PodUid;
use tessera_wire::{foreign::objects::Pod, tessera::memory_limit};

use super::world::{MEMORY_MIB, World, found, pod, share};
use crate::controller::{
    AccountSample, Event, GpuProcess, LibraryMapping, ProcessState, UsageSample, loans::RETURN_TIME,
};

const MIB: u64 = 1 << 20;

/// The GPU that all pods of these tests use.
const GPU: u8 = 2;

/// Memory of a GPU that is never lent.
const HELD_BACK_MIB: u64 = MEMORY_MIB / 32;

/// Returns a pod with 5 % and `blocks` of 256 MiB, which may grow up to `limit`.
fn borrower(name: &str, blocks: u64, limit: &str) -> Pod {
    let mut pod = owner(name, blocks);
    pod.metadata.annotations.insert(memory_limit::KEY.to_owned(), limit.to_owned());
    pod
}

fn owner(name: &str, blocks: u64) -> Pod {
    pod(name, name, &[("main", share(5, blocks))])
}

/// Returns the memory in MiB that a container may use.
fn limit(world: &World, uid: &str) -> u64 {
    world.limits[&(uid.to_owned(), "main".to_owned())].gpus[0].memory.0 / MIB
}

/// Returns a sample in which pods hold these amounts in MiB, by the driver and by their accounts.
fn sample(held: &[(&str, u64)]) -> UsageSample {
    let container = |pod: &str| (PodUid(pod.to_owned()), "main".to_owned());
    let gpu = found().gpus[usize::from(GPU)].uuid.clone();
    let process = |(pid, (pod, mib)): (u32, &(&str, u64))| GpuProcess {
        gpu: gpu.clone(),
        pid,
        started: 1,
        own_pid: Some(pid),
        container: container(pod),
        bytes: Some(mib * MIB),
        state: ProcessState::Alive,
        library: LibraryMapping::Mapped,
    };
    let account = |(pod, mib): &(&str, u64)| AccountSample {
        container: container(pod),
        processes: [1].into(),
        ended: [].into(),
        held: vec![Some(mib * MIB)],
        context_only: [].into(),
    };
    UsageSample {
        at: 7,
        sampled_gpus: found().gpus.iter().map(|gpu| gpu.uuid.clone()).collect(),
        processes: (101..).zip(held).map(process).collect(),
        times: Vec::new(),
        accounts: held.iter().map(account).collect(),
    }
}

fn observe(world: &mut World, held: &[(&str, u64)]) {
    world.wait(1);
    world.event(Event::UsageSampled(Box::new(sample(held))));
}

/// Returns a world in which pod `a` was granted 4096 MiB and has borrowed 8192 MiB.
fn world() -> World {
    let mut world = World::new();
    world.run(borrower("a", 16, "12Gi"), &[("main", &[GPU])]).unwrap();
    assert_eq!(limit(&world, "a"), 4096, "an agent that has just started does not know who uses what");
    observe(&mut world, &[("a", 4000)]);
    observe(&mut world, &[("a", 4000)]);
    assert_eq!(limit(&world, "a"), 12_288);
    observe(&mut world, &[("a", 12_288)]);
    world
}

/// Removes a pod and waits until the kubelet's list lacks it.
fn end(world: &mut World, uid: &str) {
    world.remove(uid);
    world.wait(11);
    world.event(Event::Tick);
}

/// Returns what keeps a pod from its start.
fn refusal(world: &mut World, uid: &str) -> String {
    world.start(uid).unwrap_err().to_string()
}

#[test]
fn free_memory_is_lent_to_pods_that_may_use_it() {
    let mut world = world();
    // What is left is lent to the next one, except for the part that is held back.
    world.run(borrower("b", 4, "16Gi"), &[("main", &[GPU])]).unwrap();
    let left = MEMORY_MIB - HELD_BACK_MIB - 12_288;
    assert_eq!((limit(&world, "a"), limit(&world, "b")), (12_288, left));
    // A pod without the annotation gets what it was granted, from memory that was not lent.
    end(&mut world, "b");
    world.run(owner("c", 14), &[("main", &[GPU])]).unwrap();
    assert_eq!((limit(&world, "a"), limit(&world, "c")), (12_288, 3584));
    assert!(world.events.is_empty() && world.killed.is_empty());
    world.check();
}

#[test]
fn an_agent_that_restarts_knows_the_loans() {
    let mut world = world();
    world.restart_agent();
    world.event(Event::Tick);
    assert_eq!(limit(&world, "a"), 12_288);
    observe(&mut world, &[("a", 12_288)]);
    assert_eq!(limit(&world, "a"), 12_288);
    // The annotation is gone, and so is the loan. No pod needs the memory, so no process is killed.
    world.pods.get_mut("a").unwrap().metadata.annotations.remove(memory_limit::KEY);
    world.restart_agent();
    (0..20).for_each(|_| observe(&mut world, &[("a", 12_288)]));
    assert_eq!((limit(&world, "a"), world.killed.len()), (4096, 0));
}

#[test]
fn an_administrator_can_turn_loans_off() {
    let mut world = world();
    world.settings.isolation.lend_memory = false;
    world.restart_agent();
    observe(&mut world, &[("a", 4000)]);
    assert_eq!(limit(&world, "a"), 4096);
}

#[test]
fn a_granted_pod_takes_its_memory_from_loans_and_starts_when_it_is_returned() {
    let mut world = world();
    let owner = world.bind(owner("b", 32), &[("main", &[GPU])]);
    let left = MEMORY_MIB - HELD_BACK_MIB - 4096 - 8192;
    assert_eq!(limit(&world, "a"), 4096 + left, "the limit falls before a container starts");
    world.admit(&owner).unwrap();
    let said = "waits until pod team/a has returned memory of GPU 2 that it had borrowed";
    assert_eq!(refusal(&mut world, "b"), said);
    observe(&mut world, &[("a", 12_288)]);
    assert_eq!(world.events.last().unwrap().0, "BorrowedMemoryClaimed");
    let message = &world.events.last().unwrap().1;
    assert_eq!(
        message,
        "container main has borrowed 8192 MiB of GPU 2, of which other pods now own all but 3584 MiB; it is killed \
         unless it returns the rest within 10 s"
    );
    // The first sample may have begun before the limit fell.
    observe(&mut world, &[("a", 4096 + left)]);
    world.start("b").unwrap();
    assert_eq!((limit(&world, "a"), limit(&world, "b")), (4096 + left, 8192));
    // When the owner has ended, the loan grows again.
    end(&mut world, "b");
    assert_eq!(limit(&world, "a"), 12_288);
    assert!(world.killed.is_empty());
}

#[test]
fn memory_that_is_lent_and_not_used_is_taken_without_a_wait_for_its_return() {
    let mut world = world();
    observe(&mut world, &[("a", 5000)]);
    let owner = world.bind(owner("b", 40), &[("main", &[GPU])]);
    assert_eq!(limit(&world, "a"), MEMORY_MIB - HELD_BACK_MIB - 10_240);
    world.admit(&owner).unwrap();
    // The container may have charged memory just before the limit fell, so two samples must agree.
    assert!(refusal(&mut world, "b").starts_with("waits until"));
    observe(&mut world, &[("a", 5000)]);
    observe(&mut world, &[("a", 5000)]);
    world.start("b").unwrap();
    assert!(world.events.is_empty() && world.killed.is_empty());
}

#[test]
fn a_borrower_that_returns_nothing_is_killed() {
    let mut world = world();
    let owner = world.bind(owner("b", 32), &[("main", &[GPU])]);
    world.admit(&owner).unwrap();
    (0..RETURN_TIME.as_secs()).for_each(|_| observe(&mut world, &[("a", 12_288)]));
    assert!(world.killed.is_empty());
    observe(&mut world, &[("a", 12_288)]);
    assert_eq!(world.killed, [101]);
    let reasons: Vec<&str> = world.events.iter().map(|(reason, _)| *reason).collect();
    assert_eq!(reasons, ["BorrowedMemoryClaimed", "BorrowedMemoryReclaimed"], "each is said once");
    observe(&mut world, &[]);
    world.start("b").unwrap();
    world.check();
}

/// A container can write anything into its account, but not into the driver's lists.
#[test]
fn a_false_account_frees_no_memory() {
    let mut world = world();
    let owner = world.bind(owner("b", 32), &[("main", &[GPU])]);
    world.admit(&owner).unwrap();
    let mut lie = sample(&[("a", 12_288)]);
    lie.accounts[0].held = vec![Some(0)];
    for _ in 0..3 {
        world.event(Event::UsageSampled(Box::new(lie.clone())));
    }
    assert!(refusal(&mut world, "b").starts_with("waits until"));
}

/// Containers of a simulated node that allocate up to their limits at any time, and what they hold.
struct Tenants {
    world: World,
    /// Memory in MiB that each running container was granted and holds.
    running: BTreeMap<String, (u64, u64)>,
    /// Memory in MiB of pods that are admitted and have not started yet.
    waiting: BTreeMap<String, u64>,
}

impl Tenants {
    fn held(&self) -> Vec<(String, u64)> {
        self.running.iter().map(|(pod, (_, held))| (pod.clone(), *held)).collect()
    }

    fn observe(&mut self, held: &[(String, u64)]) {
        let named: Vec<(&str, u64)> = held.iter().map(|(pod, mib)| (pod.as_str(), *mib)).collect();
        observe(&mut self.world, &named);
        for pid in std::mem::take(&mut self.world.killed) {
            let (pod, shown) = &held[usize::try_from(pid).unwrap() - 101];
            if let Some((guarantee, held)) = self.running.get_mut(pod) {
                assert!(*shown > *guarantee, "{pod} was killed although it has borrowed nothing");
                *held = 0;
            }
        }
    }

    /// Asserts that every container can get what it was granted, now.
    fn check(&self) {
        let claims: u64 = self.running.values().map(|(guarantee, held)| guarantee.max(held)).sum();
        assert!(claims <= MEMORY_MIB, "an owner cannot get its memory: {:?}", self.running);
    }
}

#[test]
fn owners_never_lose_what_they_were_granted() {
    for seed in 0..60 {
        let mut world = World::new();
        world.seed(seed * 7919 + 1);
        let mut tenants = Tenants { world, running: BTreeMap::new(), waiting: BTreeMap::new() };
        let mut stale = Vec::new();
        for step in 0..60 {
            let names: Vec<String> = tenants.running.keys().cloned().collect();
            let any = (!names.is_empty()).then(|| names[tenants.world.roll(names.len())].clone());
            match (tenants.world.roll(8), any) {
                (0 | 1, _) => {
                    let (name, blocks) = (format!("p{step}"), tenants.world.roll(24) as u64 + 1);
                    let booked: u64 = tenants.running.values().map(|(guarantee, _)| guarantee).sum();
                    let booked = booked + tenants.waiting.values().sum::<u64>();
                    if booked + blocks * 256 > MEMORY_MIB
                        || tenants.running.len() + tenants.waiting.len() > 15
                    {
                        continue;
                    }
                    let new = match tenants.world.roll(3) {
                        0 => owner(&name, blocks),
                        limit => {
                            borrower(&name, blocks, &format!("{}Mi", blocks * 256 + limit as u64 * 4000))
                        }
                    };
                    let new = tenants.world.bind(new, &[("main", &[GPU])]);
                    tenants.world.admit(&new).unwrap();
                    tenants.waiting.insert(name, blocks * 256);
                }
                (2, Some(name)) => {
                    tenants.world.remove(&name);
                    tenants.running.remove(&name);
                }
                (3 | 4, Some(name)) => {
                    let most = limit(&tenants.world, &name);
                    let (_, held) = tenants.running.get_mut(&name).unwrap();
                    *held = (*held).max(most);
                }
                (5, Some(name)) => tenants.running.get_mut(&name).unwrap().1 /= 2,
                (6, _) => tenants.world.restart_agent(),
                _ => {}
            }
            // A sample may show what was true before the last changes.
            let now = tenants.held();
            let shown = if tenants.world.roll(2) == 0 { std::mem::replace(&mut stale, now) } else { now };
            let shown: Vec<(String, u64)> =
                shown.into_iter().filter(|(name, _)| tenants.running.contains_key(name)).collect();
            tenants.observe(&shown);
            stale = tenants.held();
            if let Some((name, guarantee)) = tenants.waiting.pop_first() {
                match tenants.world.start(&name) {
                    Ok(()) => tenants.running.insert(name, (guarantee, 0)).map_or((), |_| ()),
                    Err(_) => drop(tenants.waiting.insert(name, guarantee)),
                }
            }
            tenants.check();
        }
    }
}
