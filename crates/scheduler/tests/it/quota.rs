//! Quotas of namespaces, and limits that cannot be parsed.

use proptest::prelude::*;
use serde_json::{Value, json};
use tessera_core::units::PodUid;
use tessera_scheduler::state::{BindOutcome, StateEvent, WatchEvent};

use crate::fixtures::*;

#[test]
fn an_unreadable_quota_rejects_every_gpu_pod_with_the_remedy() {
    let mut state = state(&[node("n", 1, "GiB")]);
    state.handle(StateEvent::Quota(tessera_core::quota::Quota::all_unreadable(
        "mend the ConfigMap".to_owned(),
    )));
    let answer = filter(&state, &whole("p", 1), &["n"]);
    assert_eq!(answer.failed_and_unresolvable_nodes["n"], "ExceedsGPUQuota: mend the ConfigMap");
    assert_eq!(filter(&state, &pod("plain", &[]), &["n"]).node_names.unwrap(), ["n"]);
}

#[test]
fn unreadable_limits_of_a_namespace_affect_only_that_namespace() {
    let mut state = state(&[node("n", 1, "GiB")]);
    let limits = |json: &str| {
        let home = "key gpu_quota of ConfigMap kube-system/gpuquota";
        StateEvent::Quota(tessera_wire::foreign::quota::parse(json, home).unwrap())
    };
    let of = |namespace: &str, gpus| {
        let mut pod = whole("p", gpus);
        pod["metadata"]["namespace"] = namespace.into();
        pod
    };
    state.handle(limits(r#"{"broken":{"quota":{"T4":"1"}},"limited":{"percent":0}}"#));
    let refused = filter(&state, &of("broken", 1), &["n"]).failed_and_unresolvable_nodes;
    let expected = "ExceedsGPUQuota: the limits of namespace broken in key gpu_quota of ConfigMap kube-system/gpuquota \
                    cannot be read: invalid type: string \"1\", expected u64; write {";
    assert!(refused["n"].starts_with(expected), "{refused:?}");
    assert!(state.describe_quota("broken").unwrap().starts_with("the limits of namespace broken in key"));
    let limited = filter(&state, &of("limited", 1), &["n"]);
    assert_eq!(limited.failed_nodes["n"], "ExceedsGPUQuota: GPU compute");
    assert_eq!(filter(&state, &of("free", 1), &["n"]).node_names.unwrap(), ["n"]);
    state.handle(limits(r#"{"broken":{"quota":{"T4":1}}}"#));
    assert_eq!(filter(&state, &of("broken", 1), &["n"]).node_names.unwrap(), ["n"], "mended");
}

#[test]
fn quota_counts_bookings() {
    let mut state = state(&[node("n", 4, "GiB")]);
    let limits =
        |json: &str| StateEvent::Quota(tessera_wire::foreign::quota::parse(json, "the ConfigMap").unwrap());
    state.handle(limits(r#"{"team":{"quota":{"T4":1},"pool":["public"]}}"#));
    set_pod(&mut state, &share("first", 60));
    state.begin_bind(&bind_args(&share("first", 60), "n"), at(0)).unwrap();
    let answer = filter(&state, &share("second", 50), &["n"]);
    assert_eq!(answer.failed_nodes["n"], "ExceedsGPUQuota: GPUs of this model");
    assert_eq!(filter(&state, &share("third", 40), &["n"]).node_names.unwrap(), ["n"]);
    set_pod(&mut state, &share("second", 50));
    let refused = state.begin_bind(&bind_args(&share("second", 50), "n"), at(0)).unwrap_err().to_string();
    assert_eq!(refused, "node n: ExceedsGPUQuota: GPUs of this model");
    state.end_bind(&PodUid::from("uid-first"), BindOutcome::Refused, at(0));
    assert_eq!(filter(&state, &share("second", 50), &["n"]).node_names.unwrap(), ["n"]);
    state.handle(limits(r#"{"team":{"quota":{"T4":1},"pool":["private"]}}"#));
    let answer = filter(&state, &share("second", 50), &["n"]);
    assert_eq!(answer.failed_and_unresolvable_nodes["n"], "ExceedsGPUQuota: not a pool of this namespace");
    state.handle(limits("{}"));
    assert_eq!(filter(&state, &share("second", 50), &["n"]).node_names.unwrap(), ["n"]);
}

/// Pods that pass filter together cannot exceed a ResourceQuota together, whatever dialect they use.
#[test]
fn resource_quotas_count_bookings() {
    let mut state = state(&[node("n", 4, "GiB")]);
    let quota = |hard: &str| {
        let json = format!(r#"{{"metadata":{{"name":"q","namespace":"team"}},"spec":{{"hard":{hard}}}}}"#);
        StateEvent::ResourceQuota(WatchEvent::Set(serde_json::from_str(&json).unwrap()))
    };
    state.handle(quota(r#"{"limits.nvidia.com/gpucores":"100"}"#));
    for name in ["first", "second"] {
        set_pod(&mut state, &share(name, 60));
        assert_eq!(filter(&state, &share(name, 60), &["n"]).node_names.unwrap(), ["n"]);
    }
    state.begin_bind(&bind_args(&share("first", 60), "n"), at(0)).unwrap();
    let refused = state.begin_bind(&bind_args(&share("second", 60), "n"), at(0)).unwrap_err().to_string();
    assert_eq!(refused, "node n: ExceedsGPUQuota: GPU compute");
    assert_eq!(state.describe_quota("team").unwrap(), "namespace team holds 60% of 100%");
    state.handle(quota(r#"{"limits.nvidia.com/gpucores":"120"}"#));
    state.begin_bind(&bind_args(&share("second", 60), "n"), at(0)).unwrap();
    state.handle(quota(r#"{"limits.nvidia.com/gpumem":"1"}"#));
    assert_eq!(filter(&state, &share("third", 10), &["n"]).failed_nodes["n"], "ExceedsGPUQuota: GPU memory");
}

fn resource_quota(percent: u64, mib: u64) -> StateEvent {
    let (percent, mib) = (percent.to_string(), mib.to_string());
    let hard = json!({ "limits.nvidia.com/gpucores": percent, "limits.nvidia.com/gpumem": mib });
    let quota = json!({ "metadata": { "name": "q", "namespace": "team" }, "spec": { "hard": hard } });
    StateEvent::ResourceQuota(WatchEvent::Set(serde_json::from_value(quota).unwrap()))
}

/// Returns the limits of a container: a part of one or two GPUs, with or without guaranteed compute, or whole GPUs.
fn container() -> impl Strategy<Value = Value> {
    (1..3u64, 1..GPU_MIB, prop::option::of(1..100u64), 0..5u8).prop_map(|(gpus, memory, cores, kind)| {
        match kind {
            0 => json!({ "nvidia.com/gpu": gpus.to_string() }),
            1 => json!({ "aliyun.com/gpu-mem": (memory / 1024 + 1).min(16).to_string() }),
            _ => {
                let mut limits =
                    json!({ "nvidia.com/gpu": gpus.to_string(), "nvidia.com/gpumem": memory.to_string() });
                if let Some(cores) = cores {
                    limits["nvidia.com/gpucores"] = cores.to_string().into();
                }
                limits
            }
        }
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// All pods pass filter before the first one is bound, as with several replicas of kube-scheduler. No order of
    /// binds lets a namespace hold more than its quota, whatever its containers request.
    #[test]
    fn binds_never_exceed_a_resource_quota(
        pods in prop::collection::vec((prop::collection::vec(container(), 1..3), prop::option::of(container())), 1..8),
        percent in 0..500u64,
        mib in 0..4 * GPU_MIB,
    ) {
        let mut state = state(&[node("n", 4, "GiB")]);
        state.handle(resource_quota(percent, mib));
        let written = pods.iter().enumerate().map(|(number, (mains, init))| {
            let with = |(place, limits): (usize, &Value)| {
                json!({ "name": format!("c{place}"), "resources": { "limits": limits } })
            };
            let mut written = pod(&format!("p{number}"), &[]);
            written["spec"]["containers"] = mains.iter().enumerate().map(with).collect();
            written["spec"]["initContainers"] = init.iter().map(|limits| with((9, limits))).collect();
            written
        });
        let written: Vec<Value> = written.collect();
        let passed: Vec<bool> = written
            .iter()
            .map(|pod| {
                set_pod(&mut state, pod);
                filter(&state, pod, &["n"]).node_names.is_some_and(|names| !names.is_empty())
            })
            .collect();
        let mut bound = 0;
        for (pod, passed) in written.iter().zip(passed) {
            let outcome = state.begin_bind(&bind_args(pod, "n"), at(0));
            prop_assert!(passed || outcome.is_err(), "filter rejected what bind accepts");
            // Nothing has changed since filter.
            if bound == 0 && passed {
                prop_assert!(outcome.is_ok(), "filter accepts what bind rejects: {:?}", outcome);
            }
            bound += usize::from(outcome.is_ok());
            let held = state.quota().1.of("team");
            prop_assert!(held.compute_percent <= percent && held.memory.0 <= mib, "{held:?} of {percent}% {mib} MiB");
        }
        prop_assert!(state.ledger().overbooked().is_empty());
    }
}
