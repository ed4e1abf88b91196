//! Quotas of namespaces, and limits that cannot be parsed.

use tessera_core::units::PodUid;
use tessera_scheduler::state::{BindOutcome, StateEvent};

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
