//! The placement policies.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use super::static_table::{StaticTable, TableSource};
use super::{Chosen, ContainerQuery, best_effort, links, share, tessera, whole};
use crate::forecast::Forecast;
use crate::gpu_set::GpuSet;
use crate::node::NodeState;
use crate::request::{Request, Share};

/// The rule that chooses among suitable GPUs and nodes. Ties always go to the lowest index.
#[derive(Clone, Debug)]
pub enum Policy {
    /// Tessera's default: shares waste the least free capacity, sets get the best links.
    Tessera(Arc<Forecast>),
    /// gpu-manager's rule for several GPUs: the tightest group with enough free GPUs, the fullest
    /// among equals.
    Link,
    /// gpu-manager's rule for one GPU: the subtree with the fewest free GPUs.
    Fragment,
    /// gpu-manager's rule for shares: the fullest GPU that fits. Whole GPUs follow `fragment` and
    /// `link`.
    Share,
    /// gputopology's rule: the lowest free indexes.
    Simple,
    /// gputopology's rule: sets that an administrator listed.
    Static(Arc<StaticTable>),
    /// The rule of gputopology and go-gpuallocator: the best group of the best division of the free
    /// GPUs.
    BestEffort,
    /// gpushare's rule: the GPU with the least memory left that suffices.
    Binpack,
    /// The emptiest GPU and the emptiest node.
    Spread,
    /// One policy for the GPUs of a node and another one for the nodes.
    Pair(Arc<PolicyPair>),
}

/// Policies for the two choices of a placement.
#[derive(Clone, Debug)]
pub struct PolicyPair {
    /// The policy that chooses among the GPUs of a node.
    pub gpus: Policy,
    /// The policy that chooses among the nodes.
    pub nodes: Policy,
}

/// The error for a name that is no policy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown policy {0:?}; choose one of {names}", names = Policy::NAMES.join(", "))]
pub struct UnknownPolicy(String);

impl Policy {
    /// The names of all policies, the default first.
    pub const NAMES: [&'static str; 9] =
        ["tessera", "link", "fragment", "share", "simple", "static", "best-effort", "binpack", "spread"];

    /// Returns the name that users write.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Tessera(_) => "tessera",
            Self::Link => "link",
            Self::Fragment => "fragment",
            Self::Share => "share",
            Self::Simple => "simple",
            Self::Static(_) => "static",
            Self::BestEffort => "best-effort",
            Self::Binpack => "binpack",
            Self::Spread => "spread",
            Self::Pair(pair) => pair.gpus.name(),
        }
    }

    /// Returns this policy with other policies for GPUs or nodes, where they are given.
    #[must_use]
    pub fn with(self, gpus: Option<Self>, nodes: Option<Self>) -> Self {
        if gpus.is_none() && nodes.is_none() {
            return self;
        }
        let gpus = gpus.unwrap_or_else(|| self.clone());
        Self::Pair(Arc::new(PolicyPair { gpus, nodes: nodes.unwrap_or(self) }))
    }

    /// Returns whether the policy refuses GPUs that are free but in no listed set.
    pub(super) fn has_strict_table(&self) -> bool {
        match self {
            Self::Static(table) => table.strict,
            Self::Pair(pair) => pair.gpus.has_strict_table(),
            _ => false,
        }
    }

    /// Chooses the GPUs of one container. The result is `None` only where the required GPUs cannot
    /// be combined, or where a strict table lists no free set.
    pub(super) fn choose(&self, node: &NodeState, query: &ContainerQuery) -> Option<Chosen> {
        if let Self::Pair(pair) = self {
            let chosen = pair.gpus.choose(node, query)?;
            // The points of one policy mean nothing to another one.
            let is_same = pair.gpus.name() == pair.nodes.name();
            return Some(if is_same { chosen } else { Chosen::plain(chosen.gpus) });
        }
        match query.request {
            Request::Whole(_) => self.choose_set(node, query),
            Request::Share(Share { count: 1, .. }) => self.choose_share(node, query).map(Chosen::plain),
            Request::Share(_) => self.choose_shares(node, query),
        }
    }

    /// Chooses several GPUs for a share of each: by links where the policy knows them, else by what is
    /// left of each GPU.
    fn choose_shares(&self, node: &NodeState, query: &ContainerQuery) -> Option<Chosen> {
        match self {
            Self::Tessera(forecast) => tessera::choose_shares(forecast, node, query),
            Self::Pair(pair) => pair.gpus.choose_shares(node, query),
            Self::Simple | Self::Binpack | Self::Spread => self.choose_share(node, query).map(Chosen::plain),
            Self::Link | Self::Fragment | Self::Share | Self::Static(_) | Self::BestEffort => {
                self.choose_set(node, query)
            }
        }
    }

    /// Chooses a set of GPUs by their links.
    fn choose_set(&self, node: &NodeState, query: &ContainerQuery) -> Option<Chosen> {
        let ContainerQuery { candidates: free, required, .. } = *query;
        let count = query.count();
        let topology = node.node().topology();
        let tree = node.node().topology().tree();
        let gpus = match self {
            Self::Link => whole::link(tree, free, required, count),
            Self::Fragment => whole::fragment(tree, free, required, count),
            Self::Share if count == 1 => whole::fragment(tree, free, required, count),
            Self::Share => whole::link(tree, free, required, count),
            Self::Tessera(_) => return links::choose(node, query),
            Self::Pair(pair) => return pair.gpus.choose_set(node, query),
            Self::Simple | Self::Binpack => free.lowest_with(required, count),
            Self::Spread => whole::spread(tree, free, required, count),
            Self::BestEffort => {
                let gpus = best_effort::choose(topology, free, required, count)?;
                return Some(Chosen { gpus, merit: f64::from(best_effort::set_score(topology, gpus)) });
            }
            Self::Static(table) => {
                let instance_type = node.node().instance_type.as_deref();
                let (gpus, source) = table.choose(instance_type, free, required, count)?;
                return Some(Chosen { gpus, merit: static_merit(source) });
            }
        };
        gpus.map(Chosen::plain)
    }

    fn choose_share(&self, node: &NodeState, query: &ContainerQuery) -> Option<GpuSet> {
        let order = match self {
            Self::Tessera(forecast) => return tessera::choose_share(forecast, node, query),
            Self::Pair(pair) => return pair.gpus.choose_share(node, query),
            Self::Simple => share::Order::LowestIndex,
            Self::Binpack => share::Order::LeastMemory,
            Self::Spread => share::Order::MostRoom,
            Self::Link | Self::Fragment | Self::Share | Self::Static(_) | Self::BestEffort => {
                share::Order::LeastCompute
            }
        };
        share::choose(node, query, order)
    }

    /// Returns the score of a node from its state before and after the pod, and from the points of
    /// its sets.
    pub(super) fn score(&self, before: &NodeState, after: &NodeState, merit: f64) -> f64 {
        match self {
            Self::Pair(pair) => pair.nodes.score(before, after, merit),
            Self::Tessera(forecast) => tessera::score(forecast, before, after, merit),
            Self::Link | Self::Fragment | Self::Share | Self::Binpack => fullness(after),
            Self::Spread => -fullness(after),
            Self::Simple | Self::Static(_) | Self::BestEffort => merit,
        }
    }
}

/// Returns gputopology's points for the origin of a set.
fn static_merit(source: TableSource) -> f64 {
    match source {
        TableSource::Listed => 20.0,
        TableSource::PartOfListed => 15.0,
        TableSource::Unlisted => 10.0,
    }
}

/// Returns the used percentage of the node's GPUs, where each GPU counts by its scarcer resource.
fn fullness(node: &NodeState) -> f64 {
    let gpus = node.node().gpus();
    if gpus.is_empty() {
        return 0.0;
    }
    let taken = |gpu: &crate::gpu::Gpu| {
        let room = node.room(gpu.index);
        let compute_percent = f64::from(room.compute_percent.0) / 100.0;
        #[expect(clippy::cast_precision_loss, reason = "a GPU has far less than 2^52 MiB")]
        let memory =
            if gpu.memory.0 == 0 { compute_percent } else { room.memory.0 as f64 / gpu.memory.0 as f64 };
        1.0 - compute_percent.min(memory)
    };
    #[expect(clippy::cast_precision_loss, reason = "at most 64 GPUs")]
    let count = gpus.len() as f64;
    100.0 * gpus.iter().map(taken).sum::<f64>() / count
}

impl FromStr for Policy {
    type Err = UnknownPolicy;

    /// Parses a name. `static` starts with an empty table, `tessera` with an empty forecast.
    fn from_str(name: &str) -> Result<Self, UnknownPolicy> {
        Ok(match name {
            "tessera" => Self::Tessera(Arc::default()),
            "link" => Self::Link,
            "fragment" => Self::Fragment,
            "share" => Self::Share,
            "simple" => Self::Simple,
            "static" => Self::Static(Arc::default()),
            "best-effort" | "best_effort" => Self::BestEffort,
            "binpack" => Self::Binpack,
            "spread" => Self::Spread,
            _ => return Err(UnknownPolicy(name.to_owned())),
        })
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_is_a_policy_of_that_name() {
        for name in Policy::NAMES {
            assert_eq!(name.parse::<Policy>().unwrap().name(), name);
        }
        let error = "dynamic".parse::<Policy>().unwrap_err().to_string();
        assert!(error.starts_with("unknown policy \"dynamic\"; choose one of tessera, link"), "{error}");
    }
}
