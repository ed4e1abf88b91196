use super::*;

#[test]
fn reads_preferred_affinities_and_spreading() {
    let check = |spec: &str, expected: (bool, bool)| {
        let read: PodSpec = serde_json::from_str(spec).unwrap();
        assert_eq!((read.affinity.has_preferred, read.spreading.has_preferred), expected, "{spec}");
    };
    check("{}", (false, false));
    check(r#"{"affinity":null,"topologySpreadConstraints":null}"#, (false, false));
    check(
        r#"{"affinity":{"nodeAffinity":{"requiredDuringSchedulingIgnoredDuringExecution":{"nodeSelectorTerms":[]}},"podAffinity":null}}"#,
        (false, false),
    );
    check(
        r#"{"affinity":{"podAntiAffinity":{"preferredDuringSchedulingIgnoredDuringExecution":[{"weight":1,"podAffinityTerm":{}}]}}}"#,
        (true, false),
    );
    check(r#"{"topologySpreadConstraints":[{"whenUnsatisfiable":"DoNotSchedule"}]}"#, (false, false));
    check(
        r#"{"topologySpreadConstraints":[{"maxSkew":1},{"whenUnsatisfiable":"ScheduleAnyway"}]}"#,
        (false, true),
    );
}

#[test]
fn reads_nulls_as_absent_and_skips_unknown_fields() {
    let pod: Pod = serde_json::from_str(
        r#"{"kind":"Pod","metadata":{"name":"p","annotations":null,"managedFields":[{}]},
            "spec":{"containers":[{"name":"c","resources":{"limits":{"a.b/c":3,"cpu":"100m"}}}],"initContainers":null}}"#,
    )
    .unwrap();
    let limits = &pod.spec.containers[0].resources.limits;
    assert_eq!(limits["a.b/c"], Amount("3".into()));
    assert_eq!(limits["cpu"], Amount("100m".into()));
    assert!(pod.metadata.annotations.is_empty());
}

#[test]
fn returns_current_and_previous_container_ids() {
    let status: PodStatus = serde_json::from_str(
        r#"{"containerStatuses":[{"name":"main","containerID":"containerd://abc","state":{"running":{}},
                "lastState":{"terminated":{"containerID":"containerd://old","exitCode":1}}},{"name":"new","containerID":null}],
            "initContainerStatuses":[{"name":"load","containerID":"cri-o://def","lastState":{}}],
            "ephemeralContainerStatuses":[{"name":"look","containerID":"docker://ghi"}]}"#,
    )
    .unwrap();
    let ids: Vec<_> = status.container_ids().collect();
    assert_eq!(ids, [("abc", "main"), ("old", "main"), ("def", "load"), ("ghi", "look")]);
}

#[test]
fn writes_only_fields_that_are_set() {
    let mut pod = Pod::default();
    pod.metadata.name = "p".into();
    let json = serde_json::to_string(&pod).unwrap();
    assert_eq!(json, r#"{"metadata":{"name":"p"},"spec":{"containers":[]},"status":{}}"#);
}
