//! The inspect endpoints of the original extenders, in their JSON formats.

use tessera_core::grant::PodGrant;
use tessera_core::node::NodeState;
use tessera_wire::foreign::dialect::Dialect;
use tessera_wire::{foreign::dialect::DialectSet, tessera::parsed_node::ParsedNode};

use crate::state::State;

pub use tessera_wire::foreign::inspect::{
    ShareGpu, ShareNode, SharePod, ShareView, TopologyNode, TopologyView,
};

impl State {
    /// Returns gputopology's view of all nodes with GPUs, or of one node.
    #[must_use]
    pub fn inspect_topology(&self, node: Option<&str>, detail: bool) -> TopologyView {
        let shown = self.shown(node);
        TopologyView {
            error: not_found(node, shown.is_empty()),
            nodes: shown.into_iter().map(|(_, state)| TopologyNode::new(state, detail)).collect(),
            policy: if detail { self.policy(None).to_string() } else { String::new() },
        }
    }

    /// Returns gpushare's view of all nodes that share GPU memory, or of one node.
    #[must_use]
    pub fn inspect_share(&self, node: Option<&str>) -> ShareView {
        let shares = DialectSet::default().with(Dialect::Gpushare);
        let shown: Vec<_> =
            self.shown(node).into_iter().filter(|(spec, _)| spec.dialects.offered.covers(shares)).collect();
        ShareView {
            error: not_found(node, shown.is_empty()),
            nodes: shown.into_iter().map(|(spec, state)| self.share_node(spec, state)).collect(),
        }
    }

    fn shown(&self, node: Option<&str>) -> Vec<(&ParsedNode, &NodeState)> {
        let all = self.nodes().into_iter().filter(|(name, _)| node.is_none_or(|wanted| name.0 == wanted));
        let readable = |(name, _)| {
            let (record, state) = self.node(name)?;
            Some((record.spec.as_ref().ok()?, state?))
        };
        all.filter_map(readable).filter(|(spec, _)| !spec.node.gpus().is_empty()).collect()
    }

    fn share_node(&self, spec: &ParsedNode, state: &NodeState) -> ShareNode {
        let name_of = |grant: &PodGrant| {
            let pod = self.pod(&grant.pod).map(|pod| (pod.namespace.clone(), pod.name.clone()));
            let claim = || self.claim_name(&grant.pod);
            pod.or_else(|| claim().map(|(namespace, name)| (namespace.to_owned(), format!("{name}/claim"))))
        };
        let grants: Vec<&PodGrant> = self.ledger().grants_on(&spec.node.name).collect();
        ShareNode::new(state, spec.unit, grants.into_iter(), name_of)
    }
}

fn not_found(node: Option<&str>, nothing: bool) -> String {
    match node {
        Some(node) if nothing => format!("node {node} is not known or has no GPU of this kind"),
        _ => String::new(),
    }
}
