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
    choose_with_gangs(held, &[], request, priority, proposed)
}

/// Chooses victims where the pods at these positions are in gangs.
fn choose_with_gangs(
    held: &[(i32, PodGrant)],
    gangs: &[(usize, usize)],
    request: Request,
    priority: i32,
    proposed: &[&str],
) -> Option<Vec<PodUid>> {
    let node = Arc::new(crate::fixtures::node_of_memories(&[100; 4]));
    let mut state = NodeState::empty(node);
    held.iter().for_each(|(_, grant)| state.add(grant));
    let gang_of = |position| gangs.iter().find(|(member, _)| *member == position).map(|(_, gang)| *gang);
    let holders: Vec<RunningPod<'_>> = held
        .iter()
        .enumerate()
        .map(|(position, (priority, grant))| RunningPod {
            grant: NodeGrant::Held(grant),
            priority: *priority,
            gang: gang_of(position),
            quota_released: GpuAmount::default(),
            is_guaranteed: false,
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
    Request::share(Percent(compute_percent), MiB(u64::from(compute_percent)))
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
fn the_pods_of_a_gang_go_together_and_only_where_other_pods_do_not_suffice() {
    let held = [
        (0, grant("gang-0", &[(0, 100)])),
        (0, grant("gang-1", &[(1, 100)])),
        (0, grant("single", &[(2, 100)])),
        (5, grant("dear", &[(3, 100)])),
    ];
    let gang = [(0, 7), (1, 7)];
    let choose = |count, proposed: &[&str]| {
        let chosen = choose_with_gangs(&held, &gang, Request::Whole(count), 10, proposed)?;
        Some(chosen.into_iter().map(|uid| uid.0).collect::<Vec<_>>())
    };
    let expect = |names: &[&str]| Some(names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>());
    assert_eq!(choose(1, &[]), expect(&["single"]));
    assert_eq!(choose(2, &[]), expect(&["gang-0", "gang-1"]), "a pod of higher priority is spared");
    assert_eq!(choose(1, &["gang-1"]), expect(&["gang-0", "gang-1"]), "a proposal takes the whole gang");
    // One pod of the gang may not be evicted, so no pod of the gang is.
    let held = [(0, grant("gang-0", &[(0, 100)])), (50, grant("gang-1", &[(1, 100)]))];
    assert_eq!(choose_with_gangs(&held, &gang, Request::Whole(3), 10, &[]), None);
    let proposed = choose_with_gangs(&held, &gang, Request::Whole(3), 10, &["gang-0"]);
    assert_eq!(proposed, None);
}

proptest! {
    #[test]
    fn a_gang_is_evicted_as_a_whole_or_not_at_all(
        held in prop::collection::vec((0..12i32, 0..4u8, 1..=5u32, 0..5usize), 0..12),
        request in prop_oneof![(1..=4u8).prop_map(Request::Whole), (1..10u32).prop_map(|tenths| share(tenths * 10))],
        proposed in prop::collection::vec(0..12usize, 0..3),
    ) {
        let names: Vec<String> = (0..held.len()).map(|number| format!("p{number:02}")).collect();
        let gangs: Vec<(usize, usize)> =
            held.iter().enumerate().filter(|(_, pod)| pod.3 < 3).map(|(number, pod)| (number, pod.3)).collect();
        let priority = |pod: &(i32, u8, u32, usize)| {
            let same = held.iter().filter(|other| pod.3 < 3 && other.3 == pod.3);
            same.map(|other| other.0).max().unwrap_or(pod.0)
        };
        let pods: Vec<(i32, PodGrant)> = (held.iter().zip(&names))
            .map(|(pod, name)| (priority(pod), grant(name, &[(pod.1, pod.2 * 20)])))
            .collect();
        let proposed: Vec<&str> = proposed.iter().filter_map(|number| names.get(*number)).map(String::as_str).collect();
        if let Some(chosen) = choose_with_gangs(&pods, &gangs, request, 10, &proposed) {
            for (_, gang) in &gangs {
                let members: Vec<&(i32, PodGrant)> =
                    gangs.iter().filter(|(_, other)| other == gang).map(|(number, _)| &pods[*number]).collect();
                let going = members.iter().filter(|(_, grant)| chosen.contains(&grant.pod)).count();
                prop_assert!(going == 0 || going == members.len());
                prop_assert!(going == 0 || members.iter().all(|(priority, _)| *priority < 10));
            }
            let mut state = NodeState::empty(Arc::new(crate::fixtures::node_of_memories(&[100; 4])));
            let stays = pods.iter().filter(|(_, grant)| !chosen.contains(&grant.pod));
            stays.for_each(|(_, grant)| state.add(grant));
            prop_assert!(filter(&state, &PodRequest::of_mains([request]), &Policy::Share).is_ok());
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
        gang: None,
        quota_released,
        is_guaranteed: false,
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
    let holder = |grant| RunningPod {
        grant,
        priority: 0,
        gang: None,
        quota_released: GpuAmount::default(),
        is_guaranteed: false,
    };
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
    let pods_by_gpu = [12; 8];
    let tried = |need: &Need| {
        let mut picked = vec![0, 1, 2];
        let next = || next_combination(&mut picked, held.len()).then(|| picked.clone());
        let sets = std::iter::from_fn(next)
            .filter(|set| need.may_be_met_by(set.iter().map(|pod| everybody[*pod]), &pods_by_gpu));
        sets.count()
    };
    assert_eq!(tried(&Need::IdleGpus(1, state.idle())), 0, "twelve are on each GPU");
    assert_eq!(tried(&Need::OneGpu), 8 * 220, "three of the twelve on a GPU");
}

/// Spares one pod after the other, those with the highest priority first.
fn spare_one_by_one<'a>(scenario: &Scenario<'a>, movable: &[RunningPod<'a>]) -> Vec<&'a PodUid> {
    let mut gone: Vec<&PodUid> = movable.iter().filter_map(RunningPod::pod).collect();
    for position in (0..gone.len()).rev() {
        let spared = gone.remove(position);
        if !scenario.fits_without(|holder| holder.is_one_of(&gone)) {
            gone.insert(position, spared);
        }
    }
    gone
}

/// Calls `with` with a node of `gpus` GPUs on which these pods run, each with its GPU and its percentage.
fn with_scenario<T>(
    gpus: usize,
    pods: &[(u8, u32)],
    request: Request,
    with: impl FnOnce(&Scenario<'_>, &[RunningPod<'_>]) -> T,
) -> T {
    let mut state = NodeState::empty(Arc::new(crate::fixtures::node_of_memories(&vec![100; gpus])));
    let grants: Vec<PodGrant> =
        pods.iter().enumerate().map(|(number, pod)| grant(&format!("pod-{number:05}"), &[*pod])).collect();
    grants.iter().for_each(|grant| state.add(grant));
    let holder = |grant| RunningPod {
        grant: NodeGrant::Held(grant),
        priority: 0,
        gang: None,
        quota_released: GpuAmount::default(),
        is_guaranteed: false,
    };
    let holders: Vec<RunningPod<'_>> = grants.iter().map(holder).collect();
    let request = PodRequest::of_mains([request]);
    let preemptor = Preemptor {
        request: &request,
        priority: 1,
        policy: &Policy::Share,
        quota_excess: GpuAmount::default(),
    };
    let scenario = Scenario { node: &state, holders: &holders, preemptor, summed_pods: Cell::new(0) };
    with(&scenario, &holders)
}

proptest! {
    /// Sparing blocks of pods finds the same victims as sparing one pod after the other.
    #[test]
    fn blocks_of_spared_pods_leave_the_same_victims(
        pods in prop::collection::vec((0u8..4, 1u32..40), 1..40),
        request in prop_oneof![(1u8..=4).prop_map(Request::Whole), (1u32..100).prop_map(share)],
    ) {
        with_scenario(4, &pods, request, |scenario, holders| {
            if !scenario.fits_without(|_| false) {
                prop_assert_eq!(scenario.spare(&units(holders)), spare_one_by_one(scenario, holders));
            }
            Ok(())
        })?;
    }
}

/// The effort does not grow with the square of the pods on a node.
#[test]
fn the_search_on_a_huge_node_is_bounded() {
    // 16 GPUs with 100 pods each, and each GPU is full.
    let pods: Vec<(u8, u32)> = (0..1600u16).map(|number| ((number % 16) as u8, 1)).collect();
    for request in [share(80), Request::Whole(1), Request::Whole(16)] {
        with_scenario(16, &pods, request, |scenario, holders| {
            let found = victims(scenario.node, holders, scenario.preemptor, &BTreeSet::new()).unwrap();
            assert!(scenario.fits_without(|holder| holder.pod().is_some_and(|pod| found.contains(pod))));
            let spared =
                scenario.smallest(&units(holders)).unwrap_or_else(|| scenario.spare(&units(holders)));
            assert_eq!(spared, found.iter().collect::<Vec<_>>());
            let bound = MAX_SUMMED_PODS + MAX_SPARING_SUMS + 4 * pods.len();
            assert!(scenario.summed_pods.get() <= bound, "{request:?}: {}", scenario.summed_pods.get());
        });
    }
}
