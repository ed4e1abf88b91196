//! Parses requests of a real kube-scheduler, recorded by `e2e/run extender --record`.

use std::{fs, path::Path};

use serde::de::DeserializeOwned;
use tessera_wire::foreign::{
    extender::{BindingArgs, ExtenderArgs},
    objects::Amount,
};

fn golden(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/extender").join(name);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn parse<T: DeserializeOwned>(name: &str) -> T {
    serde_json::from_str(&golden(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

#[test]
fn parses_filter_with_node_names() {
    let args: ExtenderArgs = parse("filter-by-name.json");
    assert!(args.nodes.is_none());
    assert_eq!(args.names().collect::<Vec<_>>(), ["fair", "fine", "full"]);
    assert_eq!(args.pod.metadata.name, "placed-by-name");
    assert_eq!(args.pod.metadata.namespace, "default");
    assert_eq!(args.pod.metadata.uid, "11111111-2222-3333-4444-555555555555");
    assert_eq!(args.pod.metadata.annotations["example.com/note"], "kept");
    assert_eq!(args.pod.spec.scheduler_name, "by-name");
    assert_eq!(args.pod.spec.node_name, "");
    let resources = &args.pod.spec.containers[0].resources;
    assert_eq!(resources.limits["e2e.tessera.dev/gpu"], Amount("2".into()));
    assert_eq!(resources.limits, resources.requests);
}

#[test]
fn parses_filter_with_node_objects() {
    let args: ExtenderArgs = parse("filter-by-node.json");
    assert!(args.node_names.is_none());
    assert_eq!(args.names().collect::<Vec<_>>(), ["fair", "fine", "full"]);
    let nodes = args.nodes.unwrap();
    assert_eq!(nodes.items[0].status.allocatable["e2e.tessera.dev/gpu"], Amount("80".into()));
    assert_eq!(nodes.items[0].metadata.labels["kubernetes.io/hostname"], "fair");
}

#[test]
fn prioritize_contains_only_the_nodes_that_passed_filter() {
    for name in ["prioritize-by-name.json", "prioritize-by-node.json"] {
        let args: ExtenderArgs = parse(name);
        assert_eq!(args.names().collect::<Vec<_>>(), ["fair", "fine"], "{name}");
    }
}

#[test]
fn bind_is_written_as_it_was_parsed() {
    for name in ["bind-by-name.json", "bind-by-node.json"] {
        let args: BindingArgs = parse(name);
        assert_eq!(args.node, "fine");
        let written = serde_json::to_value(&args).unwrap();
        assert_eq!(written, parse::<serde_json::Value>(name));
    }
}
