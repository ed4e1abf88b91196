use super::*;

fn labels(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
    pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
}

fn unmet(pod: &PodConstraints, node: &NodeConstraints) -> Option<String> {
    pod.unmet_on("n", node).map(|unmet| unmet.to_string())
}

#[test]
fn a_cordoned_node_needs_the_toleration_of_cordons() {
    let node = NodeConstraints { unschedulable: true, ..NodeConstraints::default() };
    assert_eq!(unmet(&PodConstraints::default(), &node).unwrap(), "node is cordoned (unschedulable)");
    let toleration = Toleration { key: UNSCHEDULABLE_TAINT.to_owned(), ..Toleration::default() };
    let tolerant = PodConstraints { tolerations: vec![toleration], ..PodConstraints::default() };
    assert_eq!(unmet(&tolerant, &node), None);
}

#[test]
fn names_the_taint_and_the_label() {
    let taint = Taint { key: "gpu".to_owned(), value: "a".to_owned(), effect: TaintEffect::NoExecute };
    let node = NodeConstraints { taints: vec![taint], ..NodeConstraints::default() };
    let expected = "node has the taint gpu=a:NoExecute, which the pod does not tolerate";
    assert_eq!(unmet(&PodConstraints::default(), &node).unwrap(), expected);
    let pod = PodConstraints { node_selector: labels(&[("zone", "b")]), ..PodConstraints::default() };
    let expected = "node lacks the label zone=b of the pod's nodeSelector";
    assert_eq!(unmet(&pod, &NodeConstraints::default()).unwrap(), expected);
    let labelled = NodeConstraints { labels: labels(&[("zone", "b")]), ..NodeConstraints::default() };
    assert_eq!(unmet(&pod, &labelled), None);
}

#[test]
fn evaluates_node_affinity_as_kubernetes_does() {
    let node =
        NodeConstraints { labels: labels(&[("gen", "7"), ("zone", "a")]), ..NodeConstraints::default() };
    let term = |key: &str, operator, values: &[&str], is_field: bool| {
        let values = values.iter().map(|value| (*value).to_owned()).collect();
        let expression = NodeExpression { key: key.to_owned(), operator, values };
        match is_field {
            true => NodeTerm { fields: vec![expression], ..NodeTerm::default() },
            false => NodeTerm { labels: vec![expression], ..NodeTerm::default() },
        }
    };
    let check = |terms: Vec<NodeTerm>, fits: bool| {
        let pod = PodConstraints { node_terms: Some(terms), ..PodConstraints::default() };
        assert_eq!(unmet(&pod, &node).is_none(), fits, "{pod:?}");
    };
    check(vec![term("zone", NodeOperator::In, &["a", "b"], false)], true);
    check(vec![term("zone", NodeOperator::In, &["b"], false)], false);
    check(vec![term("zone", NodeOperator::NotIn, &["b"], false)], true);
    check(vec![term("rack", NodeOperator::NotIn, &["b"], false)], true);
    check(vec![term("rack", NodeOperator::Exists, &[], false)], false);
    check(vec![term("rack", NodeOperator::DoesNotExist, &[], false)], true);
    check(vec![term("gen", NodeOperator::Gt, &["6"], false)], true);
    check(vec![term("gen", NodeOperator::Lt, &["7"], false)], false);
    check(vec![term("zone", NodeOperator::Gt, &["6"], false)], false);
    check(vec![term("zone", NodeOperator::Undefined, &["a"], false)], false);
    check(vec![term("metadata.name", NodeOperator::In, &["n"], true)], true);
    check(vec![term("metadata.name", NodeOperator::In, &["other"], true)], false);
    check(vec![NodeTerm::default()], false);
    check(Vec::new(), false);
    check(
        vec![term("zone", NodeOperator::In, &["b"], false), term("gen", NodeOperator::Exists, &[], false)],
        true,
    );
}

#[test]
fn compares_other_resources_with_the_offer_of_the_node() {
    let amounts = |amount: u64| BTreeMap::from([("nvidia.com/gpumem".to_owned(), amount)]);
    let pod = PodConstraints { other_resources: amounts(3000), ..PodConstraints::default() };
    let expected = "node offers 0 of nvidia.com/gpumem, and the pod requests 3000";
    assert_eq!(unmet(&pod, &NodeConstraints::default()).unwrap(), expected);
    let offering = NodeConstraints { other_resources: amounts(3000), ..NodeConstraints::default() };
    assert_eq!(unmet(&pod, &offering), None);
}

#[test]
fn a_node_with_its_largest_number_of_pods_takes_no_other() {
    let node = NodeConstraints { max_pods: Some(110), ..NodeConstraints::default() };
    assert_eq!(node.unmet_by_pods(109), None);
    assert_eq!(node.unmet_by_pods(110), Some(UnmetConstraint::Pods(110)));
    assert_eq!(NodeConstraints::default().unmet_by_pods(1000), None, "the node states no limit");
    assert_eq!(UnmetConstraint::Pods(110).to_string(), "node has its largest number of pods, 110");
}

/// Storage and huge pages are counted in bytes, so a plain number would have sixteen digits.
#[test]
fn amounts_of_storage_have_units() {
    let reason = |resource: &str, offered, requested| {
        UnmetConstraint::Resource { resource: resource.to_owned(), offered, requested }.to_string()
    };
    assert_eq!(
        reason("ephemeral-storage", 107_374_182_400, 5_497_558_138_880_000),
        "node offers 100 GiB of ephemeral-storage, and the pod requests 4.8 PiB"
    );
    assert_eq!(
        reason("hugepages-2Mi", 0, 1536 << 10),
        "node offers 0 B of hugepages-2Mi, and the pod requests 1.5 MiB"
    );
    assert_eq!(
        reason("example.com/nic", 0, 4096),
        "node offers 0 of example.com/nic, and the pod requests 4096"
    );
}
