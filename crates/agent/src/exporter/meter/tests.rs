use proptest::prelude::*;
use tessera_core::units::PodUid;
use tessera_node::gpus::{BusyTime, ProcessMemory};
use tessera_wire::foreign::cgroup::CgroupOwner;

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
fn who(pid: u32) -> Option<ProcessInfo> {
    let owner = match pid {
        0..=3 => CgroupOwner::Pod { uid: format!("pod-{pid}"), container: Some(format!("c{pid}")) },
        4 => CgroupOwner::Host,
        _ => return None,
    };
    Some(ProcessInfo { started: 1, command: String::new(), owner })
}

fn look(
    from: u64,
    to: u64,
    card: Option<f64>,
    busy: Option<Vec<(u32, f64)>>,
    energy: Option<u64>,
) -> Observation {
    let processes = (0..6).map(|pid| ProcessMemory { pid, bytes: Some(1), instance: None }).collect();
    let work = BusyTime { from, to, card, processes: busy };
    let sample = GpuSample { processes: Some(processes), work, energy, ..GpuSample::default() };
    let who = (0..6).filter_map(|pid| Some((pid, who(pid)?))).collect();
    Observation { at: 0.0, took: 0.0, sample, who }
}

fn sums(card: &GpuMeter) -> Tally {
    let sum = |part: fn(&Tally) -> f64| card.holders.values().map(part).sum::<f64>();
    Tally {
        busy: sum(|tally| tally.busy),
        energy: sum(|tally| tally.energy) + card.idle_energy,
        last_busy: None,
    }
}

fn close(a: f64, b: f64) -> bool {
    (a - b).abs() < 1e-6 * a.abs().max(1.0)
}

/// One look: how long after the last, the GPU's busy part, those of the processes, the energy used.
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
    fn whatever_comes_the_parts_of_a_gpu_add_up_and_only_grow(steps in prop::collection::vec(step(), 1..30)) {
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
        meter.observe(&gpu, Observation { sample: GpuSample::default(), ..look(0, 0, None, None, None) });
        meter.learn(&pods(&alive.iter().copied().collect::<Vec<_>>()));
        let of_pods = |holder: &&Consumer| matches!(holder, Consumer::Container(_));
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
    let pod = Consumer::Container(ContainerKey { uid: PodUid("pod-0".into()), container: "main".into() });
    assert_eq!(card.holders[&pod], Tally { busy: 1.2, energy: 75.0, last_busy: Some(3.0) });
    assert!(close(card.holders[&Consumer::Host].energy, 25.0));
    assert_eq!((card.idle_energy, card.total.energy), (20.0, 120.0));
    // The driver was loaded anew.
    meter.observe(&gpu, look(5 * SECOND, 6 * SECOND, Some(0.0), Some(vec![]), Some(1_000)));
    assert_eq!(meter.card(&gpu).unwrap().total.energy, 120.0);
}

#[test]
fn energy_that_was_not_told_comes_with_the_next_reading() {
    let gpu: GpuUuid = "GPU-a".into();
    let mut meter = Meter::default();
    for (second, energy) in [(1, Some(5_000)), (2, None), (3, Some(65_000))] {
        assert!(meter.card(&gpu).is_none_or(|card| !card.has_energy()), "nobody knows yet");
        meter.observe(&gpu, look(second * SECOND, (second + 1) * SECOND, Some(0.0), Some(vec![]), energy));
    }
    assert_eq!(meter.card(&gpu).unwrap().total.energy, 60.0);
    // More than fits into 32 bits, after hours without an answer.
    meter.observe(&gpu, look(4 * SECOND, 5 * SECOND, Some(0.0), Some(vec![]), Some(10_000_065_000)));
    assert_eq!(meter.card(&gpu).unwrap().total.energy, 10_000_060.0);
}

/// The counter is read at every third look; meanwhile first 0 is busy at 300 W, then nobody at 100 W.
#[test]
fn energy_between_two_readings_goes_by_what_was_drawn_in_each_interval() {
    let gpu: GpuUuid = "GPU-a".into();
    let mut meter = Meter::default();
    meter.learn(&pods(&[0]));
    for (second, busy, watts, energy) in
        [(1, 0.0, 100, 0), (2, 0.5, 300, 0), (3, 0.0, 100, 0), (4, 0.0, 100, 500_000), (5, 0.5, 300, 500_000)]
    {
        let mut look =
            look(second * SECOND, (second + 1) * SECOND, Some(busy), Some(vec![(0, busy)]), Some(energy));
        look.sample.sensors.power = Some(watts * 1000);
        meter.observe(&gpu, look);
    }
    let card = meter.card(&gpu).unwrap();
    let holder = &card.holders[&Consumer::Container(key(0))];
    assert!(close(holder.energy, 250.0) && close(card.idle_energy, 250.0), "{holder:?} {}", card.idle_energy);
}

#[test]
fn a_gpu_that_comes_back_goes_on_where_it_was() {
    let gpu: GpuUuid = "GPU-a".into();
    let mut meter = Meter::default();
    meter.observe(&gpu, look(SECOND, 3 * SECOND, Some(0.5), Some(vec![]), None));
    meter.keep(&[]);
    assert!(meter.card(&gpu).unwrap().latest.is_none(), "it shows nothing meanwhile");
    meter.keep(std::slice::from_ref(&gpu));
    meter.observe(&gpu, look(9 * SECOND, 10 * SECOND, Some(0.5), Some(vec![]), None));
    assert_eq!(meter.card(&gpu).unwrap().total.busy, 1.5);
}

fn key(number: u8) -> ContainerKey {
    ContainerKey { uid: PodUid(format!("pod-{number}")), container: "main".into() }
}

fn report(gpu: &GpuUuid, shares: &[(u8, ShareReport)]) -> ShareReports {
    shares.iter().map(|(number, throttle)| ((key(*number), gpu.clone()), *throttle)).collect()
}

#[test]
fn the_part_of_time_in_which_a_container_waited_follows_from_two_reports() {
    let mut meter = Meter::default();
    let gpu: GpuUuid = "GPU-a".into();
    let mut waits = |seconds, at| {
        meter.report(report(&gpu, &[(0, ShareReport { seconds, ..ShareReport::default() })]), at, at);
        let (throttle, part) = meter.throttle(&key(0), &gpu);
        (throttle.unwrap().seconds, part)
    };
    assert_eq!(waits(1.0, 100.0), (1.0, None));
    assert_eq!(waits(1.5, 102.0), (1.5, Some(0.25)));
    assert_eq!(waits(0.5, 104.0), (2.0, Some(0.25)), "started again, it counts from zero, and we go on");
    assert_eq!(waits(0.5, 103.0), (2.0, None), "the clock was set back");
}

#[test]
fn what_a_library_reported_goes_with_the_pod_and_not_before() {
    let mut meter = Meter::default();
    let gpu: GpuUuid = "GPU-a".into();
    meter.learn(&pods(&[0]));
    meter.report(
        report(&gpu, &[(0, ShareReport { waits: 3, windows: 7, ..ShareReport::default() })]),
        1.0,
        1.0,
    );
    meter.report(ShareReports::new(), 2.0, 2.0);
    assert_eq!(meter.throttle(&key(0), &gpu).0.unwrap().windows, 7, "between two starts");
    meter.learn(&pods(&[]));
    assert_eq!(meter.throttle(&key(0), &gpu).0, None);
}

/// By the driver's samples 0 did everything; by their windows 0 and 1 had the GPU in turns.
#[test]
fn containers_that_share_by_windows_are_told_apart_by_these() {
    let gpu: GpuUuid = "GPU-a".into();
    let mut meter = Meter::default();
    meter.learn(&pods(&[0, 1]));
    let open = |open| ShareReport { open, windows: 1, ..ShareReport::default() };
    // Told half a second late, as it comes.
    for (at, first, second) in [(9.5, 0.0, 5.0), (10.5, 0.3, 5.2), (11.5, 0.9, 5.3), (12.5, 0.9, 5.3)] {
        meter.report(report(&gpu, &[(0, open(first)), (1, open(second))]), at + 0.5, at);
        if at == 11.5 {
            meter.observe(&gpu, look(10 * SECOND, 12 * SECOND, Some(0.6), Some(vec![(0, 0.6)]), None));
            assert!(meter.card(&gpu).unwrap().now.is_none(), "not settled before the windows are told");
        }
    }
    meter.observe(&gpu, look(12 * SECOND, 14 * SECOND, Some(0.0), Some(vec![]), None));
    let card = meter.card(&gpu).unwrap();
    // 0.15 + 0.6 and 0.1 + 0.1 seconds of the two, of which the GPU was busy for 1.2.
    let busy = |number| card.holders[&Consumer::Container(key(number))].busy;
    assert!(close(busy(0), 1.2 * 0.75 / 0.95) && close(busy(1), 1.2 * 0.2 / 0.95), "{:?}", card.holders);
    assert!(close(card.total.busy, 1.2));
    assert!(close(card.now.as_ref().unwrap().processes[&0], 0.6 * 0.75 / 0.95));
}
