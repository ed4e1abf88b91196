use proptest::prelude::*;
use tessera_core::units::PodUid;
use tessera_node::gpus::{ProcessMemory, Work};
use tessera_wire::cgroup::Owner;

use super::*;

const SECOND: u64 = 1_000_000;

fn pods(alive: &[u8]) -> Vec<PodView> {
    let pod = |number: &u8| PodView {
        uid: PodUid(format!("pod-{number}")),
        namespace: "n".into(),
        name: format!("p{number}"),
        kubelet_uid: None,
        containers: vec![(format!("c{number}"), "main".into())],
        ended: false,
    };
    alive.iter().map(pod).collect()
}

/// Processes 0 to 3 are of pods of the same number, 4 is the host's, 5 nobody knows.
fn who(pid: u32) -> Option<Process> {
    let owner = match pid {
        0..=3 => Owner::Pod { uid: format!("pod-{pid}"), container: Some(format!("c{pid}")) },
        4 => Owner::Host,
        _ => return None,
    };
    Some(Process { started: 1, command: String::new(), owner })
}

fn look(
    from: u64,
    to: u64,
    card: Option<f64>,
    busy: Option<Vec<(u32, f64)>>,
    energy: Option<u64>,
) -> Observation {
    let processes = (0..6).map(|pid| ProcessMemory { pid, bytes: Some(1), instance: None }).collect();
    let work = Work { from, to, card, processes: busy };
    let sample = CardSample { processes: Some(processes), work, energy, ..CardSample::default() };
    let who = (0..6).filter_map(|pid| Some((pid, who(pid)?))).collect();
    Observation { at: 0.0, took: 0.0, sample, who }
}

fn sums(card: &CardMeter) -> Tally {
    let sum = |part: fn(&Tally) -> f64| card.holders.values().map(part).sum::<f64>();
    Tally { busy: sum(|tally| tally.busy), energy: sum(|tally| tally.energy) + card.idle_energy }
}

fn close(a: f64, b: f64) -> bool {
    (a - b).abs() < 1e-6 * a.abs().max(1.0)
}

/// One look: how long after the last, the card's busy part, those of the processes, the energy used.
type Step = (u64, Option<f64>, Option<Vec<(u32, f64)>>, Option<u64>);

fn step() -> impl Strategy<Value = Step> {
    let busy = prop::collection::vec((0..6u32, 0.0..1.0f64), 0..6).prop_map(|mut all| {
        all.sort_by_key(|(pid, _)| *pid);
        all.dedup_by_key(|(pid, _)| *pid);
        all
    });
    (0..3 * SECOND, prop::option::of(0.0..1.0f64), prop::option::of(busy), prop::option::of(0..1_000_000u64))
}

proptest! {
    #[test]
    fn whatever_comes_the_parts_of_a_card_add_up_and_only_grow(steps in prop::collection::vec(step(), 1..30)) {
        let gpu: GpuUuid = "GPU-a".into();
        let mut meter = Meter::default();
        let (mut now, mut energy) = (SECOND, 0);
        let mut before = Tally::default();
        // All pods stay: what goes with a pod is another matter.
        meter.learn(&pods(&[0, 1, 2, 3]));
        for (passed, card, busy, joules) in steps {
            energy += joules.unwrap_or(0);
            meter.observe(&gpu, look(now, now + passed, card, busy, joules.map(|_| energy)));
            now += passed;
            let card = meter.card(&gpu).unwrap();
            let parts = sums(card);
            prop_assert!(close(parts.busy, card.total.busy), "{:?} {:?}", parts, card.total);
            prop_assert!(close(parts.energy, card.total.energy), "{:?} {:?}", parts, card.total);
            prop_assert!(card.total.busy >= before.busy && card.total.energy >= before.energy);
            before = card.total;
        }
    }

    #[test]
    fn accounts_are_of_living_pods_alone(alive in prop::collection::btree_set(0..4u8, 0..4)) {
        let gpu: GpuUuid = "GPU-a".into();
        let mut meter = Meter::default();
        meter.learn(&pods(&[0, 1, 2, 3]));
        let busy = (0..6).map(|pid| (pid, 0.1)).collect();
        meter.observe(&gpu, look(SECOND, 2 * SECOND, Some(1.0), Some(busy), None));
        // Their processes have ended.
        meter.observe(&gpu, Observation { sample: CardSample::default(), ..look(0, 0, None, None, None) });
        meter.learn(&pods(&alive.iter().copied().collect::<Vec<_>>()));
        let of_pods = |holder: &&Holder| matches!(holder, Holder::Container(_));
        prop_assert_eq!(meter.card(&gpu).unwrap().holders.keys().filter(of_pods).count(), alive.len());
    }
}

#[test]
fn energy_goes_to_the_busy_by_how_much_they_were_and_else_to_idleness() {
    let gpu: GpuUuid = "GPU-a".into();
    let mut meter = Meter::default();
    meter.learn(&pods(&[0, 1]));
    meter.observe(&gpu, look(SECOND, SECOND, None, None, Some(5_000)));
    meter.observe(&gpu, look(SECOND, 3 * SECOND, Some(0.8), Some(vec![(0, 0.6), (4, 0.2)]), Some(105_000)));
    meter.observe(&gpu, look(3 * SECOND, 5 * SECOND, Some(0.0), Some(vec![]), Some(125_000)));
    let card = meter.card(&gpu).unwrap();
    let pod = Holder::Container(ContainerKey { uid: PodUid("pod-0".into()), container: "main".into() });
    assert_eq!(card.holders[&pod], Tally { busy: 1.2, energy: 75.0 });
    assert!(close(card.holders[&Holder::Host].energy, 25.0));
    assert_eq!((card.idle_energy, card.total.energy), (20.0, 120.0));
    // The driver was loaded anew.
    meter.observe(&gpu, look(5 * SECOND, 6 * SECOND, Some(0.0), Some(vec![]), Some(1_000)));
    assert_eq!(meter.card(&gpu).unwrap().total.energy, 120.0);
}

#[test]
fn the_part_of_time_in_which_a_container_waited_follows_from_two_reports() {
    let mut meter = Meter::default();
    let key = ContainerKey { uid: PodUid("pod-0".into()), container: "main".into() };
    let gpu: GpuUuid = "GPU-a".into();
    let report = |seconds| {
        Throttles::from([((key.clone(), gpu.clone()), Throttle { seconds, ..Throttle::default() })])
    };
    meter.report(report(1.0), 100.0);
    assert_eq!(meter.throttle(&key, &gpu).1, None);
    meter.report(report(1.5), 102.0);
    assert_eq!(meter.throttle(&key, &gpu).1, Some(0.25));
    // The container was started again and counts from zero.
    meter.report(report(0.5), 104.0);
    assert_eq!(meter.throttle(&key, &gpu).1, Some(0.0));
}
