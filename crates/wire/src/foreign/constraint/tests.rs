use tessera_core::taint::{untolerated_hard, untolerated_soft};

use super::*;
use crate::foreign::objects::{NodeSpec, PodStatus};

/// Compares the numbers of soft and hard taints that the pod does not tolerate.
fn check(taints: &str, tolerations: &str, soft: usize, hard: bool) {
    let node: NodeSpec = serde_json::from_str(&format!(r#"{{"taints":{taints}}}"#)).unwrap();
    let pod: PodSpec = serde_json::from_str(&format!(r#"{{"tolerations":{tolerations}}}"#)).unwrap();
    let found = untolerated_soft(&node.taints, &pod.tolerations);
    let is_kept_off = untolerated_hard(&node.taints, &pod.tolerations).is_some();
    assert_eq!((found, is_kept_off), (soft, hard), "{taints} {tolerations}");
}

#[test]
fn matches_tolerations_like_kubernetes() {
    const SPOT: &str = r#"[{"key":"spot","value":"yes","effect":"PreferNoSchedule"}]"#;
    check("null", "null", 0, false);
    check(r#"[{"key":"hard","effect":"NoSchedule"},{"key":"out","effect":"NoExecute"}]"#, "[]", 0, true);
    check(r#"[{"key":"hard","effect":"NoSchedule"}]"#, r#"[{"key":"hard","operator":"Exists"}]"#, 0, false);
    check(SPOT, "[]", 1, false);
    check(SPOT, r#"[{"key":"spot","operator":"Exists"}]"#, 0, false);
    check(SPOT, r#"[{"key":"spot","operator":"Exists","effect":"NoSchedule"}]"#, 1, false);
    check(SPOT, r#"[{"key":"spot","value":"yes","effect":"PreferNoSchedule"}]"#, 0, false);
    check(SPOT, r#"[{"key":"spot","operator":"Equal","value":"no"}]"#, 1, false);
    check(SPOT, r#"[{"operator":"Exists"}]"#, 0, false);
    check(SPOT, r#"[{"key":"spot","operator":"Gt","value":"1"}]"#, 1, false);
    let two = r#"[{"key":"a","effect":"PreferNoSchedule"},{"key":"b","effect":"PreferNoSchedule"}]"#;
    check(two, r#"[{"key":"a","operator":"Exists"}]"#, 1, false);
}

#[test]
fn reads_every_constraint_of_a_pod() {
    let spec: PodSpec = serde_json::from_str(
        r#"{"nodeSelector":{"zone":"a"},
            "affinity":{"nodeAffinity":{"requiredDuringSchedulingIgnoredDuringExecution":{"nodeSelectorTerms":[
                {"matchExpressions":[{"key":"gen","operator":"Gt","values":["6"]}],
                 "matchFields":[{"key":"metadata.name","operator":"In","values":["n"]}]}]}},
              "podAntiAffinity":{"requiredDuringSchedulingIgnoredDuringExecution":[
                {"topologyKey":"t","labelSelector":{"matchLabels":{"app":"a"}}}]},
              "podAffinity":{"requiredDuringSchedulingIgnoredDuringExecution":[{"topologyKey":"t"}]}},
            "topologySpreadConstraints":[{"whenUnsatisfiable":"DoNotSchedule"}],
            "volumes":[{"name":"v","persistentVolumeClaim":{"claimName":"c"}}],
            "tolerations":[{"key":"node.kubernetes.io/not-ready","operator":"Exists","effect":"NoExecute"}],
            "containers":[{"name":"c","ports":[{"hostPort":80,"containerPort":80}],
              "resources":{"limits":{"nvidia.com/gpu":"1","nvidia.com/mig-1g.5gb":"3k","cpu":"4","rdma/hca":"1"}}}]}"#,
    )
    .unwrap();
    let constraints = spec.constraints();
    assert_eq!(constraints.node_selector["zone"], "a");
    let terms = constraints.node_terms.unwrap();
    assert_eq!((terms[0].labels[0].operator, terms[0].fields[0].values.len()), (NodeOperator::Gt, 1));
    assert!(constraints.tolerations.is_empty(), "the API server adds this toleration to every pod");
    assert_eq!(
        constraints.other_resources,
        BTreeMap::from([("nvidia.com/mig-1g.5gb".to_owned(), 3000), ("rdma/hca".to_owned(), 1)])
    );
    assert_eq!(spec.other_gpu_resources(), ["nvidia.com/mig-1g.5gb"]);
    let unchecked = [
        "required pod affinity",
        "required pod anti-affinity to pods without GPUs",
        "topology spread constraints",
        "the nodes of its volumes",
        "ports of the host that pods without GPUs use",
        "other resources that pods hold",
    ];
    assert_eq!(spec.unchecked_constraints(), unchecked);
    assert!(PodSpec::default().unchecked_constraints().is_empty());
}

#[test]
fn keeps_only_the_verdict_of_the_scheduler() {
    let status: PodStatus = serde_json::from_str(
        r#"{"conditions":[{"type":"Ready","status":"False"},
            {"type":"PodScheduled","status":"False","reason":"Unschedulable","message":"0/3 nodes",
             "lastTransitionTime":"2026-01-01T00:00:00Z"}]}"#,
    )
    .unwrap();
    let verdict = status.conditions.unscheduled.unwrap();
    assert_eq!((verdict.reason.as_str(), verdict.message.as_str()), ("Unschedulable", "0/3 nodes"));
    let placed = r#"{"conditions":[{"type":"PodScheduled","status":"True"}]}"#;
    assert_eq!(serde_json::from_str::<PodStatus>(placed).unwrap().conditions, PodConditions::default());
    let preempted =
        r#"{"conditions":[{"type":"DisruptionTarget","status":"True","reason":"PreemptionByScheduler"}]}"#;
    assert!(serde_json::from_str::<PodStatus>(preempted).unwrap().conditions.is_preempted);
    let evicted =
        r#"{"conditions":[{"type":"DisruptionTarget","status":"True","reason":"EvictionByEvictionAPI"}]}"#;
    assert!(!serde_json::from_str::<PodStatus>(evicted).unwrap().conditions.is_preempted);
}

/// A term that depends on labels of namespaces, or on labels of the pod that the API server copies, is not evaluated.
#[test]
fn reads_terms_of_anti_affinity() {
    let read = |term: &str| -> PodSpec {
        let affinity = format!(
            r#"{{"affinity":{{"podAntiAffinity":{{"requiredDuringSchedulingIgnoredDuringExecution":[{{"topologyKey":"t"{term}}}]}}}}}}"#
        );
        serde_json::from_str(&affinity).unwrap()
    };
    let check = |term: &str, expected: Option<TermNamespaces>| {
        let spec = read(term);
        let namespaces = spec.affinity.excluded.first().map(|term| term.namespaces.clone());
        assert_eq!(namespaces, expected, "{term}");
        assert_eq!(spec.affinity.excludes_more, expected.is_none(), "{term}");
        assert_eq!(
            spec.unchecked_constraints().len(),
            1,
            "{term}: only kube-scheduler knows pods without GPUs"
        );
    };
    // A term without a selector excludes no pod, whatever else it has.
    for term in ["", r#","namespaceSelector":{"matchLabels":{"team":"a"}}"#] {
        let spec = read(term);
        assert_eq!((spec.affinity.excluded.len(), spec.affinity.excludes_more), (0, false), "{term}");
        assert!(spec.unchecked_constraints().is_empty(), "{term}");
    }
    const SELECTOR: &str = r#","labelSelector":{"matchLabels":{"app":"a"}}"#;
    check(SELECTOR, Some(TermNamespaces::Own));
    check(r#","labelSelector":{}"#, Some(TermNamespaces::Own));
    let with = |more: &str| format!("{SELECTOR}{more}");
    check(&with(r#","namespaces":["b"]"#), Some(TermNamespaces::Named(vec!["b".to_owned()])));
    check(&with(r#","namespaceSelector":{}"#), Some(TermNamespaces::All));
    check(&with(r#","namespaceSelector":{"matchLabels":{"team":"a"}}"#), None);
    check(&with(r#","matchLabelKeys":["pod-template-hash"]"#), None);
    check(&with(r#","mismatchLabelKeys":["tenant"]"#), None);
}

#[test]
fn reads_ports_of_the_host() {
    let spec: PodSpec = serde_json::from_str(
        r#"{"containers":[{"name":"c","ports":[{"hostPort":80},{"containerPort":81},{"hostPort":0},{"hostPort":70000},
            {"hostPort":53,"protocol":"UDP","hostIP":"10.0.0.1"},{"hostPort":82,"hostIP":"0.0.0.0"}]}]}"#,
    )
    .unwrap();
    let labels = BTreeMap::new();
    let ports = spec.as_other_pod("n", &labels).ports;
    let read: Vec<_> =
        ports.iter().map(|port| (port.port, port.protocol.as_str(), port.address.as_deref())).collect();
    assert_eq!(read, [(80, "TCP", None), (53, "UDP", Some("10.0.0.1")), (82, "TCP", None)]);
}

/// kube-scheduler ignores the ports of init containers that end. With the host's network, every port is one of the host.
#[test]
fn counts_ports_of_the_host_like_kubernetes() {
    let check = |spec: &str, expected: &[u16]| {
        let spec: PodSpec = serde_json::from_str(spec).unwrap();
        let labels = BTreeMap::new();
        let ports: Vec<u16> = spec.as_other_pod("n", &labels).ports.iter().map(|port| port.port).collect();
        assert_eq!(ports, expected, "{spec:?}");
        assert_eq!(spec.unchecked_constraints().is_empty(), expected.is_empty(), "{spec:?}");
    };
    check(r#"{"initContainers":[{"name":"i","ports":[{"hostPort":80}]}]}"#, &[]);
    check(r#"{"initContainers":[{"name":"i","restartPolicy":"Always","ports":[{"hostPort":80}]}]}"#, &[80]);
    const PORTS: &str =
        r#""containers":[{"name":"c","ports":[{"containerPort":81},{"containerPort":82,"hostPort":83}]}]"#;
    check(&format!("{{{PORTS}}}"), &[83]);
    check(&format!(r#"{{"hostNetwork":true,{PORTS}}}"#), &[81, 83]);
    check(&format!(r#"{{"hostNetwork":null,{PORTS}}}"#), &[83]);
}

/// Containers that run at the same time add up, as for kube-scheduler.
#[test]
fn adds_up_other_resources_like_kubernetes() {
    let check = |spec: &str, expected: &[(&str, u64)]| {
        let spec: PodSpec = serde_json::from_str(spec).unwrap();
        let expected = expected.iter().map(|(name, amount)| ((*name).to_owned(), *amount)).collect();
        assert_eq!(spec.constraints().other_resources, expected, "{spec:?}");
    };
    let container = |requests: &str, limits: &str| {
        format!(r#"{{"name":"c","resources":{{"requests":{{{requests}}},"limits":{{{limits}}}}}}}"#)
    };
    let hca = |amount: u64| container("", &format!(r#""rdma/hca":"{amount}""#));
    let mains = |all: &[String]| format!(r#"{{"containers":[{}]}}"#, all.join(","));
    check(&mains(&[hca(1), hca(2)]), &[("rdma/hca", 3)]);
    let pages = |amount: &str| container("", &format!(r#""hugepages-2Mi":"{amount}""#));
    check(&mains(&[pages("2Mi"), pages("4Mi")]), &[("hugepages-2Mi", 6 << 20)]);
    // A limit of local storage may exceed the request, and only the request counts.
    let storage = container(r#""ephemeral-storage":"1Ki""#, r#""ephemeral-storage":"8Ki""#);
    let limited = container("", r#""ephemeral-storage":"2Ki""#);
    check(&mains(&[storage, limited]), &[("ephemeral-storage", 3 << 10)]);
    let sidecar = hca(1).replacen('{', r#"{"restartPolicy":"Always","#, 1);
    let with_init = |init: &str| {
        format!(
            r#"{{"initContainers":[{sidecar},{init}],"containers":[{}],"overhead":{{"rdma/hca":"1"}}}}"#,
            hca(4)
        )
    };
    check(&with_init(&hca(2)), &[("rdma/hca", 6)]);
    check(&with_init(&hca(7)), &[("rdma/hca", 9)]);
}

/// Other resources that pods hold may be free again later, so they tie a pod to no other object.
#[test]
fn other_resources_are_known_to_kube_scheduler_alone() {
    let check = |resource: &str, expected: &[&str]| {
        let spec =
            format!(r#"{{"containers":[{{"name":"c","resources":{{"limits":{{"{resource}":"1"}}}}}}]}}"#);
        let spec: PodSpec = serde_json::from_str(&spec).unwrap();
        assert_eq!(spec.unchecked_constraints(), expected, "{resource}");
        assert!(spec.relations_to_others().is_empty(), "{resource}");
    };
    for resource in ["rdma/hca", "amd.com/gpu", "ephemeral-storage", "hugepages-1Gi"] {
        check(resource, &["other resources that pods hold"]);
    }
    // What pods hold of these is known.
    for resource in ["cpu", "memory", "nvidia.com/gpu", "nvidia.com/mig-1g.5gb"] {
        check(resource, &[]);
    }
}
