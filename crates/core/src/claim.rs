//! Claims of dynamic resource allocation as holders of GPUs.
//!
//! A claim is an object of its own that several pods may use, so the ledger counts it once, under a name of its own
//! ([`ClaimUid::holder`]). kube-scheduler chooses the GPUs of a claim. [`review`] decides whether the choice stays when
//! the pod is bound.

use crate::bandwidth::Sets;
use crate::gpu::GpuKind;
use crate::gpu_set::GpuSet;
use crate::grant::{ContainerGrant, GpuUsage, Hold};
use crate::node::NodeState;
use crate::placement::{Policy, links, place};
use crate::request::{ContainerRole, LinkSensitivity, MemoryRequest, PodRequest, Request, Share};
use crate::units::{GpuIndex, PodUid};

/// The UID of a claim.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClaimUid(pub String);

/// What a claim holds by one of its requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClaimPart {
    /// The name of the request.
    pub request: String,
    /// The GPUs in the order of the allocation.
    pub gpus: Vec<GpuIndex>,
    /// What is held of each GPU.
    pub hold: Hold,
}

/// The freedom to choose other GPUs for a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exchange {
    /// Every GPU of the same kind serves the claim equally.
    SameKind {
        /// True if all GPUs of the claim must be different.
        distinct: bool,
    },
    /// Only the GPUs that were allocated.
    None,
}

/// The decision about the GPUs of a claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Review {
    /// The allocated GPUs stay.
    Keep,
    /// Other GPUs of the node take their place.
    Replace {
        /// The requests with their new GPUs.
        parts: Vec<ClaimPart>,
        /// The reason of the replacement.
        why: Replacement,
    },
    /// The allocated GPUs have no room, and no other GPUs of the node can take their place.
    NoRoom(GpuIndex),
}

/// The reason why the GPUs of a claim are replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Replacement {
    /// An allocated GPU has too little left.
    NoRoom,
    /// Another set has better links.
    BetterLinks,
    /// Another set leaves better links to later jobs, and its own links are not worse where they matter.
    LinksOfOthers,
}

/// Start of the names under which the ledger has claims. No pod has such a UID.
const HOLDER_PREFIX: &str = "claim:";

// === impl ClaimUid ===

impl ClaimUid {
    /// Returns the name under which the ledger has the claim.
    #[must_use]
    pub fn holder(&self) -> PodUid {
        PodUid(format!("{HOLDER_PREFIX}{}", self.0))
    }

    /// Returns whether a holder of the ledger is a claim and not a pod.
    #[must_use]
    pub fn is_holder(holder: &PodUid) -> bool {
        holder.0.starts_with(HOLDER_PREFIX)
    }
}

// === impl Replacement ===

impl std::fmt::Display for Replacement {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::NoRoom => "the allocated GPUs were given to another pod",
            Self::BetterLinks => "these GPUs have better links",
            Self::LinksOfOthers => "these GPUs leave better links to later jobs",
        })
    }
}

/// Returns what a claim holds as grants, one for each request. All requests are held at the same time.
#[must_use]
pub fn grants(parts: &[ClaimPart]) -> Vec<ContainerGrant> {
    let grant = |part: &ClaimPart| {
        let gpus: GpuSet = part.gpus.iter().copied().collect();
        ContainerGrant {
            container: part.request.clone(),
            role: ContainerRole::Main,
            holds: gpus.iter().map(|gpu| (gpu, part.hold)).collect(),
        }
    };
    parts.iter().map(grant).collect()
}

/// Decides whether the allocated GPUs of a claim stay. `node` is the node without the claim.
#[must_use]
pub fn review(
    node: &NodeState,
    parts: &[ClaimPart],
    exchange: Exchange,
    policy: &Policy,
    links: LinkSensitivity,
) -> Review {
    let full = first_without_room(node, parts);
    if full.is_none() && !depends_on_links(node, parts) {
        return Review::Keep;
    }
    let Exchange::SameKind { distinct } = exchange else { return full.map_or(Review::Keep, Review::NoRoom) };
    match (full, choose(node, parts, policy, links, distinct)) {
        (None, Some(chosen)) => better_links(node, parts, &chosen, links)
            .map_or(Review::Keep, |why| Review::Replace { parts: chosen, why }),
        (None, None) => Review::Keep,
        (Some(_), Some(chosen)) => Review::Replace { parts: chosen, why: Replacement::NoRoom },
        (Some(gpu), None) => Review::NoRoom(gpu),
    }
}

/// Returns the first GPU that has no room for what the claim holds of it.
fn first_without_room(node: &NodeState, parts: &[ClaimPart]) -> Option<GpuIndex> {
    let held = grants(parts);
    let over = |(gpu, usage): (GpuIndex, GpuUsage)| {
        let memory = node.node().gpu(gpu).map(|found| found.memory);
        memory.is_none_or(|memory| node.used(gpu).plus(usage).exceeds(memory)).then_some(gpu)
    };
    crate::grant::footprint(&held).find_map(over)
}

/// Returns whether sets of as many GPUs of the node have different links.
fn depends_on_links(node: &NodeState, parts: &[ClaimPart]) -> bool {
    let is_even = matches!(node.node().topology().bandwidth_model().sets(), Sets::Alike(_));
    !is_even
        && parts.iter().all(|part| part.hold == Hold::Whole)
        && parts.iter().any(|part| part.gpus.len() > 1)
}

/// Returns why the chosen GPUs are worth the two writes of a replacement, or `None` if they are not.
///
/// The policy chooses the best links now, then the best links for later jobs. Without the latter, the jobs of a DGX-1
/// lose 0.02 of their bandwidth.
fn better_links(
    node: &NodeState,
    parts: &[ClaimPart],
    chosen: &[ClaimPart],
    traffic: LinkSensitivity,
) -> Option<Replacement> {
    let (before, after) = (link_share(node, parts), link_share(node, chosen));
    let is_preferred =
        || sets(chosen).zip(sets(parts)).any(|(new, old)| links::is_preferred(node, traffic, new, old));
    match traffic {
        LinkSensitivity::Sensitive if after > before => Some(Replacement::BetterLinks),
        LinkSensitivity::Sensitive if after < before => None,
        LinkSensitivity::Sensitive | LinkSensitivity::Insensitive => {
            is_preferred().then_some(Replacement::LinksOfOthers)
        }
    }
}

fn sets(parts: &[ClaimPart]) -> impl Iterator<Item = GpuSet> {
    parts.iter().filter(|part| part.gpus.len() > 1).map(|part| part.gpus.iter().copied().collect())
}

/// Returns the sum of the relative bandwidths of all sets of several GPUs: 1 for each that is the best of its size.
fn link_share(node: &NodeState, parts: &[ClaimPart]) -> f64 {
    let model = node.node().topology().bandwidth_model();
    sets(parts).map(|set| model.share(set)).sum()
}

/// Chooses GPUs of the same kind again, or returns `None` where none are possible.
fn choose(
    node: &NodeState,
    parts: &[ClaimPart],
    policy: &Policy,
    links: LinkSensitivity,
    distinct: bool,
) -> Option<Vec<ClaimPart>> {
    let mut kinds = parts.iter().flat_map(|part| &part.gpus).map(|gpu| node.node().gpu(*gpu));
    let kind: GpuKind = kinds.next()??.kind();
    if !kinds.all(|gpu| gpu.is_some_and(|gpu| gpu.kind() == kind)) {
        return None;
    }
    let mut offered = node.clone();
    for gpu in node.node().gpus().iter().filter(|gpu| gpu.kind() != kind) {
        offered.add_usage(gpu.index, GpuUsage::of(Hold::Whole));
    }
    let requests = parts.iter().map(request).collect::<Option<Vec<Request>>>()?;
    let pod = PodRequest { link_sensitivity: links, ..PodRequest::of_mains(requests) };
    let placement = place(&offered, &pod, policy, GpuSet::EMPTY).ok()?;
    let total: usize = placement.gpus.iter().map(|gpus| gpus.len()).sum();
    let different = placement.gpus.iter().copied().fold(GpuSet::EMPTY, GpuSet::union).len();
    if distinct && different != total {
        return None;
    }
    let chosen = parts.iter().zip(&placement.gpus);
    Some(chosen.map(|(part, gpus)| ClaimPart { gpus: gpus.iter().collect(), ..part.clone() }).collect())
}

fn request(part: &ClaimPart) -> Option<Request> {
    let count = u8::try_from(part.gpus.len()).ok()?;
    Some(match part.hold {
        Hold::Whole => Request::Whole(count),
        Hold::Share { compute_percent, memory } => {
            Request::Share(Share { count, compute_percent, memory: MemoryRequest::Amount(memory) })
        }
    })
}

#[cfg(test)]
mod tests;
