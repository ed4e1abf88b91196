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

/// Processes 0 to 3 belong to the pods of the same number, 4 is the host's, and 5 is unknown.
fn process(pid: u32) -> Option<ProcessInfo> {
    let owner = match pid {
        0..=3 => CgroupOwner::Pod { uid: format!("pod-{pid}"), container: Some(format!("c{pid}")) },
        4 => CgroupOwner::Host,
        _ => return None,
    };
    Some(ProcessInfo { started: 1, command: String::new(), owner })
}

fn observation(
    from: u64,
    to: u64,
    gpu: Option<f64>,
    busy: Option<Vec<(u32, f64)>>,
    energy: Option<u64>,
) -> Observation {
    let processes = (0..6).map(|pid| ProcessMemory { pid, bytes: Some(1), instance: None }).collect();
    let work = BusyTime { from, to, gpu, processes: busy };
    let sample = GpuSample { processes: Some(processes), work, energy, ..GpuSample::default() };
    let processes = (0..6).filter_map(|pid| Some((pid, process(pid)?))).collect();
    Observation { at: 0.0, duration_seconds: 0.0, sample, processes }
}

fn sums(gpu: &GpuMeter) -> Tally {
    let sum = |part: fn(&Tally) -> f64| gpu.consumers.values().map(part).sum::<f64>();
    Tally {
        busy: sum(|tally| tally.busy),
        energy: sum(|tally| tally.energy) + gpu.idle_energy,
        last_busy: None,
    }
}

fn close(a: f64, b: f64) -> bool {
    (a - b).abs() < 1e-6 * a.abs().max(1.0)
}

/// One sample: time since the last one, busy fraction of the GPU and of its processes, energy used.
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
    fn parts_of_a_gpu_add_up_and_only_grow(steps in prop::collection::vec(step(), 1..30)) {
        let uuid: GpuUuid = "GPU-a".into();
        let mut meter = Meter::default();
        let (mut now, mut energy) = (SECOND, 0);
        let mut before = Tally::default();
        // No pod ends here. Another test covers the end of a pod.
        meter.set_pods(&pods(&[0, 1, 2, 3]));
        for (passed, gpu, busy, joules) in steps {
            energy += joules.unwrap_or(0);
            meter.observe(&uuid, observation(now, now + passed, gpu, busy, joules.map(|_| energy)));
            now += passed;
            let gpu = meter.gpu(&uuid).unwrap();
            let parts = sums(gpu);
            prop_assert!(close(parts.busy, gpu.total.busy), "{:?} {:?}", parts, gpu.total);
            prop_assert!(close(parts.energy, gpu.total.energy), "{:?} {:?}", parts, gpu.total);
            prop_assert!(gpu.total.busy >= before.busy && gpu.total.energy >= before.energy);
            before = gpu.total;
        }
    }

    #[test]
    fn drops_the_usage_of_pods_that_ended(alive in prop::collection::btree_set(0..4u8, 0..4)) {
        let uuid: GpuUuid = "GPU-a".into();
        let mut meter = Meter::default();
        meter.set_pods(&pods(&[0, 1, 2, 3]));
        let busy = (0..6).map(|pid| (pid, 0.1)).collect();
        meter.observe(&uuid, observation(SECOND, 2 * SECOND, Some(1.0), Some(busy), None));
        // The processes of all pods have ended.
        meter.observe(&uuid, Observation { sample: GpuSample::default(), ..observation(0, 0, None, None, None) });
        meter.set_pods(&pods(&alive.iter().copied().collect::<Vec<_>>()));
        let of_pods = |consumer: &&Consumer| matches!(consumer, Consumer::Container(_));
        prop_assert_eq!(meter.gpu(&uuid).unwrap().consumers.keys().filter(of_pods).count(), alive.len());
    }
}

#[test]
fn divides_energy_by_busy_time_and_counts_the_rest_as_idle() {
    let uuid: GpuUuid = "GPU-a".into();
    let mut meter = Meter::default();
    meter.set_pods(&pods(&[0, 1]));
    meter.observe(&uuid, observation(SECOND, SECOND, None, None, Some(5_000)));
    meter.observe(
        &uuid,
        observation(SECOND, 3 * SECOND, Some(0.8), Some(vec![(0, 0.6), (4, 0.2)]), Some(105_000)),
    );
    meter.observe(&uuid, observation(3 * SECOND, 5 * SECOND, Some(0.0), Some(vec![]), Some(125_000)));
    let gpu = meter.gpu(&uuid).unwrap();
    let pod = Consumer::Container(ContainerKey { uid: PodUid("pod-0".into()), container: "main".into() });
    assert_eq!(gpu.consumers[&pod], Tally { busy: 1.2, energy: 75.0, last_busy: Some(3.0) });
    assert!(close(gpu.consumers[&Consumer::Host].energy, 25.0));
    assert_eq!((gpu.idle_energy, gpu.total.energy), (20.0, 120.0));
    // The driver was reloaded, and its counter starts from zero.
    meter.observe(&uuid, observation(5 * SECOND, 6 * SECOND, Some(0.0), Some(vec![]), Some(1_000)));
    assert_eq!(meter.gpu(&uuid).unwrap().total.energy, 120.0);
}

#[test]
fn counts_missing_energy_with_the_next_reading() {
    let uuid: GpuUuid = "GPU-a".into();
    let mut meter = Meter::default();
    for (second, energy) in [(1, Some(5_000)), (2, None), (3, Some(65_000))] {
        assert!(meter.gpu(&uuid).is_none_or(|gpu| !gpu.has_energy()), "one reading is not enough");
        meter.observe(
            &uuid,
            observation(second * SECOND, (second + 1) * SECOND, Some(0.0), Some(vec![]), energy),
        );
    }
    assert_eq!(meter.gpu(&uuid).unwrap().total.energy, 60.0);
    // The growth exceeds 32 bits after hours without a reading.
    meter.observe(&uuid, observation(4 * SECOND, 5 * SECOND, Some(0.0), Some(vec![]), Some(10_000_065_000)));
    assert_eq!(meter.gpu(&uuid).unwrap().total.energy, 10_000_060.0);
}

/// The counter changes with every third sample. In between, pod 0 is busy at 300 W, then the GPU
/// idles at 100 W.
#[test]
fn divides_energy_between_two_readings_by_power() {
    let uuid: GpuUuid = "GPU-a".into();
    let mut meter = Meter::default();
    meter.set_pods(&pods(&[0]));
    for (second, busy, watts, energy) in
        [(1, 0.0, 100, 0), (2, 0.5, 300, 0), (3, 0.0, 100, 0), (4, 0.0, 100, 500_000), (5, 0.5, 300, 500_000)]
    {
        let mut observed = observation(
            second * SECOND,
            (second + 1) * SECOND,
            Some(busy),
            Some(vec![(0, busy)]),
            Some(energy),
        );
        observed.sample.sensors.power = Some(watts * 1000);
        meter.observe(&uuid, observed);
    }
    let gpu = meter.gpu(&uuid).unwrap();
    let consumer = &gpu.consumers[&Consumer::Container(key(0))];
    assert!(
        close(consumer.energy, 250.0) && close(gpu.idle_energy, 250.0),
        "{consumer:?} {}",
        gpu.idle_energy
    );
}

#[test]
fn a_gpu_that_returns_continues_its_counters() {
    let uuid: GpuUuid = "GPU-a".into();
    let mut meter = Meter::default();
    meter.observe(&uuid, observation(SECOND, 3 * SECOND, Some(0.5), Some(vec![]), None));
    meter.hide_missing(&[]);
    assert!(meter.gpu(&uuid).unwrap().latest.is_none(), "a missing GPU has no gauges");
    meter.hide_missing(std::slice::from_ref(&uuid));
    meter.observe(&uuid, observation(9 * SECOND, 10 * SECOND, Some(0.5), Some(vec![]), None));
    assert_eq!(meter.gpu(&uuid).unwrap().total.busy, 1.5);
}

fn key(number: u8) -> ContainerKey {
    ContainerKey { uid: PodUid(format!("pod-{number}")), container: "main".into() }
}

fn report(gpu: &GpuUuid, shares: &[(u8, ShareReport)]) -> ShareReports {
    shares.iter().map(|(number, throttle)| ((key(*number), gpu.clone()), *throttle)).collect()
}

#[test]
fn computes_the_throttled_fraction_from_two_reports() {
    let mut meter = Meter::default();
    let uuid: GpuUuid = "GPU-a".into();
    let mut waits = |seconds, at| {
        meter.report(
            report(&uuid, &[(0, ShareReport { throttled_seconds: seconds, ..ShareReport::default() })]),
            at,
            at,
        );
        let (report, part) = meter.share(&key(0), &uuid);
        (report.unwrap().throttled_seconds, part)
    };
    assert_eq!(waits(1.0, 100.0), (1.0, None));
    assert_eq!(waits(1.5, 102.0), (1.5, Some(0.25)));
    assert_eq!(
        waits(0.5, 104.0),
        (2.0, Some(0.25)),
        "a restarted container counts from zero, the total does not"
    );
    assert_eq!(waits(0.5, 103.0), (2.0, None), "the clock was set back");
}

#[test]
fn keeps_reports_until_the_pod_is_gone() {
    let mut meter = Meter::default();
    let uuid: GpuUuid = "GPU-a".into();
    meter.set_pods(&pods(&[0]));
    meter.report(
        report(&uuid, &[(0, ShareReport { waits: 3, windows: 7, ..ShareReport::default() })]),
        1.0,
        1.0,
    );
    meter.report(ShareReports::new(), 2.0, 2.0);
    assert_eq!(meter.share(&key(0), &uuid).0.unwrap().windows, 7, "the container is restarting");
    meter.set_pods(&pods(&[]));
    assert_eq!(meter.share(&key(0), &uuid).0, None);
}

/// The driver's samples name only pod 0. By their windows, pods 0 and 1 alternated.
#[test]
fn divides_busy_time_by_windows_where_containers_have_them() {
    let uuid: GpuUuid = "GPU-a".into();
    let mut meter = Meter::default();
    meter.set_pods(&pods(&[0, 1]));
    // Half of the time in the windows is idle.
    let open = |busy_seconds| ShareReport {
        window_seconds: 2.0 * busy_seconds,
        busy_seconds,
        windows: 1,
        ..ShareReport::default()
    };
    // The reports arrive half a second late.
    for (at, first, second) in [(9.5, 0.0, 5.0), (10.5, 0.3, 5.2), (11.5, 0.9, 5.3), (12.5, 0.9, 5.3)] {
        meter.report(report(&uuid, &[(0, open(first)), (1, open(second))]), at + 0.5, at);
        if at == 11.5 {
            meter
                .observe(&uuid, observation(10 * SECOND, 12 * SECOND, Some(0.6), Some(vec![(0, 0.6)]), None));
            assert!(
                meter.gpu(&uuid).unwrap().latest_split.is_none(),
                "the interval is divided after the windows are reported"
            );
        }
    }
    meter.observe(&uuid, observation(12 * SECOND, 14 * SECOND, Some(0.0), Some(vec![]), None));
    let gpu = meter.gpu(&uuid).unwrap();
    // The windows were busy for 0.15 + 0.6 s and 0.1 + 0.1 s. The GPU was busy for 1.2 s.
    let busy = |number| gpu.consumers[&Consumer::Container(key(number))].busy;
    assert!(close(busy(0), 1.2 * 0.75 / 0.95) && close(busy(1), 1.2 * 0.2 / 0.95), "{:?}", gpu.consumers);
    assert!(close(gpu.total.busy, 1.2));
    assert!(close(gpu.latest_split.as_ref().unwrap().processes.as_ref().unwrap()[&0], 0.6 * 0.75 / 0.95));
}
