//! Fixtures that several targets share.

use tessera_wire::foreign::dialect::MemoryUnit;
use tessera_wire::foreign::objects::Pod;
use tessera_wire::tessera::parsed_node::{self, ParsedNode};

/// Returns a node with two GPUs that serves every dialect.
///
/// # Panics
/// If the fixture itself cannot be parsed.
#[must_use]
pub fn node() -> ParsedNode {
    let node = serde_json::from_str(include_str!("../fixtures/node.json")).expect("the fixture is JSON");
    parsed_node::parse(&node, MemoryUnit::GiB).expect("the fixture is a node")
}

/// Returns a pod with one container of each dialect.
///
/// # Panics
/// If the fixture itself cannot be parsed.
#[must_use]
pub fn pod() -> Pod {
    serde_json::from_str(include_str!("../fixtures/pod.json")).expect("the fixture is a pod")
}
