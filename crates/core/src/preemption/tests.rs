use std::sync::Arc;

use proptest::prelude::*;

use super::*;
use crate::grant::{ContainerGrant, Hold, PodGrant};
use crate::request::{ContainerRole, Request};
use crate::units::{GpuIndex, MiB, MilliCpu, Percent};

/// Returns a pod by name and the percentage of each of its GPUs; 100 is a whole GPU.
type Held = (&'static str, i32, &'static [(u8, u32)]);

fn grant(name: &str, shares: &[(u8, u32)]) -> PodGrant {
    let hold = |compute_percent| match compute_percent {
        100 => Hold::Whole,
        compute_percent => {
            Hold::Share { compute_percent: Percent(compute_percent), memory: MiB(u64::from(compute_percent)) }
        }
    };
    let holds =
        shares.iter().map(|(gpu, compute_percent)| (GpuIndex(*gpu), hold(*compute_percent))).collect();
    PodGrant {
        pod: name.into(),
        node: "node".into(),
        cpu: MilliCpu::ZERO,
        memory: MiB::ZERO,
        containers: vec![ContainerGrant { container: "c".to_owned(), role: ContainerRole::Main, holds }],
    }
}

fn choose(
    held: &[(i32, PodGrant)],
    request: Request,
    priority: i32,
    proposed: &[&str],
) -> Option<Vec<PodUid>> {
    let node = Arc::new(crate::fixtures::node_of_memories(&[100; 4]));
    let mut state = NodeState::empty(node);
    held.iter().for_each(|(_, grant)| state.add(grant));
    let holders: Vec<RunningPod<'_>> = held
        .iter()
        .map(|(priority, grant)| RunningPod {
            grant: NodeGrant::Held(grant),
            priority: *priority,
            quota_released: GpuAmount::default(),
        })
        .collect();
    let request = PodRequest::of_mains([request]);
    let preemptor =
        Preemptor { request: &request, priority, policy: &Policy::Share, quota_excess: GpuAmount::default() };
    victims(&state, &holders, preemptor, &proposed.iter().map(|name| (*name).into()).collect())
}

fn check(held: &[Held], request: Request, proposed: &[&str], expected: Option<&[&str]>) {
    let held: Vec<(i32, PodGrant)> =
        held.iter().map(|(name, priority, shares)| (*priority, grant(name, shares))).collect();
    let expected = expected.map(|names| names.iter().map(|name| PodUid::from(*name)).collect::<Vec<_>>());
    assert_eq!(choose(&held, request, 10, proposed), expected);
}

fn share(compute_percent: u32) -> Request {
    Request::Share { compute_percent: Percent(compute_percent), memory: MiB(u64::from(compute_percent)) }
}

const FULL: [Held; 5] = [
    ("a", 0, &[(0, 60)]),
    ("b", 0, &[(0, 40)]),
    ("c", 1, &[(1, 100)]),
    ("d", 5, &[(2, 100)]),
    ("e", 20, &[(3, 100)]),
];

#[test]
fn evicts_one_share_for_another() {
    check(&FULL, share(50), &[], Some(&["a"]));
    check(&FULL, share(40), &[], Some(&["a"]));
    check(&FULL, share(70), &[], Some(&["a", "b"]));
}

#[test]
fn evicts_lower_priorities_even_if_that_takes_more_pods() {
    check(&FULL, Request::Whole(1), &[], Some(&["a", "b"]));
    check(&FULL, Request::Whole(2), &[], Some(&["a", "b", "c"]));
    check(&FULL, Request::Whole(3), &[], Some(&["a", "b", "c", "d"]));
    check(&FULL, Request::Whole(4), &[], None);
}

#[test]
fn keeps_a_sufficient_proposal_and_replaces_any_other() {
    check(&FULL, share(30), &["c"], Some(&["c"]));
    check(&FULL, share(50), &["b"], Some(&["a"]));
    check(&FULL, share(50), &["nobody"], Some(&["a"]));
}

/// Tries all small sets one after the other: the reference for the search with conditions.
fn smallest_by_trying(held: &[(i32, PodGrant)], request: Request) -> Option<usize> {
    let fits = |gone: &[usize]| {
        let mut state = NodeState::empty(Arc::new(crate::fixtures::node_of_memories(&[100; 4])));
        let stays = held.iter().enumerate().filter(|(place, _)| !gone.contains(place));
        stays.for_each(|(_, (_, grant))| state.add(grant));
        filter(&state, &PodRequest::of_mains([request]), &Policy::Share).is_ok()
    };
    (0..=MAX_SEARCHED_SET.min(held.len())).find(|size| {
        let mut picked: Vec<usize> = (0..*size).collect();
        fits(&picked)
            || std::iter::from_fn(|| next_combination(&mut picked, held.len()).then(|| fits(&picked)))
                .any(|it| it)
    })
}

proptest! {
    #[test]
    fn returns_a_smallest_set(
        held in prop::collection::vec(prop::collection::btree_map(0..4u8, 1..=5u32, 1..3), 0..9),
        request in prop_oneof![(1..=4u8).prop_map(Request::Whole), (1..10u32).prop_map(|tenths| share(tenths * 10))],
    ) {
        let grant = |(number, shares): (usize, &std::collections::BTreeMap<u8, u32>)| {
            let shares: Vec<(u8, u32)> = shares.iter().map(|(gpu, fifths)| (*gpu, fifths * 20)).collect();
            (0, grant(&format!("p{number:02}"), &shares))
        };
        let held: Vec<(i32, PodGrant)> = held.iter().enumerate().map(grant).collect();
        let chosen = choose(&held, request, 10, &[]).map(|chosen| chosen.len());
        match smallest_by_trying(&held, request) {
            Some(size) => prop_assert_eq!(chosen, Some(size)),
            None => prop_assert!(chosen.is_none_or(|size| size > MAX_SEARCHED_SET)),
        }
    }

    #[test]
    fn victims_have_lower_priority_suffice_and_are_all_needed(
        held in prop::collection::vec((0..15i32, 0..4u8, 1..=10u32), 0..12),
        compute_percent in 1..=10u32,
    ) {
        let held: Vec<(i32, PodGrant)> = held
            .iter()
            .enumerate()
            .map(|(number, (priority, gpu, tenths))| (*priority, grant(&format!("p{number:02}"), &[(*gpu, tenths * 10)])))
            .collect();
        let request = if compute_percent == 10 { Request::Whole(1) } else { share(compute_percent * 10) };
        if let Some(chosen) = choose(&held, request, 10, &[]) {
            let rest = |spared: Option<&PodUid>| -> Vec<(i32, PodGrant)> {
                let stays = |grant: &PodGrant| !chosen.contains(&grant.pod) || Some(&grant.pod) == spared;
                held.iter().filter(|(_, grant)| stays(grant)).cloned().collect()
            };
            let fits = |left: &[(i32, PodGrant)]| {
                let mut state = NodeState::empty(Arc::new(crate::fixtures::node_of_memories(&[100; 4])));
                left.iter().for_each(|(_, grant)| state.add(grant));
                filter(&state, &PodRequest::of_mains([request]), &Policy::Share).is_ok()
            };
            prop_assert!(fits(&rest(None)));
            for victim in &chosen {
                prop_assert!(held.iter().any(|(priority, grant)| grant.pod == *victim && *priority < 10));
                prop_assert!(!fits(&rest(Some(victim))), "{victim} need not go");
            }
        }
    }
}

#[test]
fn only_pods_of_the_same_quota_are_evicted_for_it() {
    let node = Arc::new(crate::fixtures::node_of_memories(&[100; 2]));
    let mut state = NodeState::empty(node);
    let grants = [grant("ours", &[(0, 60)]), grant("theirs", &[(1, 60)]), grant("dear", &[(0, 20)])];
    grants.iter().for_each(|grant| state.add(grant));
    let percent = |compute_percent| GpuAmount { compute_percent, memory: MiB::ZERO };
    let holder = |number: usize, priority, quota_released| RunningPod {
        grant: NodeGrant::Held(&grants[number]),
        priority,
        quota_released,
    };
    let holders = [holder(0, 1, percent(60)), holder(1, 0, GpuAmount::default()), holder(2, 50, percent(20))];
    let request = PodRequest::of_mains([share(40)]);
    let choose = |quota_excess, proposed: &[&str]| {
        let preemptor = Preemptor { request: &request, priority: 10, policy: &Policy::Share, quota_excess };
        victims(&state, &holders, preemptor, &proposed.iter().map(|name| (*name).into()).collect())
    };
    assert_eq!(choose(percent(0), &[]), Some(vec![]), "there is room");
    assert_eq!(choose(percent(30), &[]), Some(vec!["ours".into()]));
    assert_eq!(choose(percent(30), &["theirs"]), Some(vec!["ours".into()]));
    assert_eq!(choose(percent(61), &[]), None, "the rest is held by one that matters more");
}

#[test]
fn an_eviction_does_not_release_a_booking_in_doubt() {
    let mut state = NodeState::empty(Arc::new(crate::fixtures::node_of_memories(&[100; 2])));
    let grants = [grant("bound", &[(0, 60)]), grant("doubtful", &[(1, 60)])];
    grants.iter().for_each(|grant| state.add(grant));
    let holder = |grant| RunningPod { grant, priority: 0, quota_released: GpuAmount::default() };
    let holders = [holder(NodeGrant::Held(&grants[0])), holder(NodeGrant::InDoubt(&grants[1]))];
    let choose = |request, proposed: &str| {
        let request = PodRequest::of_mains([request]);
        let quota_excess = GpuAmount::default();
        let preemptor = Preemptor { request: &request, priority: 10, policy: &Policy::Share, quota_excess };
        victims(&state, &holders, preemptor, &BTreeSet::from([proposed.into()]))
    };
    assert_eq!(choose(share(50), "doubtful"), Some(vec!["bound".into()]));
    assert_eq!(choose(Request::Whole(2), "doubtful"), None);
}

#[test]
fn does_not_try_every_combination_of_many_necessary_victims() {
    let node = Arc::new(crate::fixtures::node_of_memories(&[100; 8]));
    let held: Vec<PodGrant> = (0..96u8).map(|pod| grant(&format!("p{pod}"), &[(pod % 8, 8)])).collect();
    let mut state = NodeState::empty(node);
    held.iter().for_each(|grant| state.add(grant));
    let everybody: Vec<GpuSet> = held.iter().map(|grant| grant.containers[0].gpus()).collect();
    let tried = |need: &Need| {
        let mut picked = vec![0, 1, 2];
        let next = || next_combination(&mut picked, held.len()).then(|| picked.clone());
        let sets = std::iter::from_fn(next)
            .filter(|set| need.may_be_met_by(set.iter().map(|pod| everybody[*pod]), &everybody));
        sets.count()
    };
    assert_eq!(tried(&Need::IdleGpus(1, state.idle())), 0, "twelve are on each GPU");
    assert_eq!(tried(&Need::OneGpu), 8 * 220, "three of the twelve on a GPU");
}
