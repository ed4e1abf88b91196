//! Cached verdicts: a node is judged again for a request shape only after the node has changed.
//!
//! Pods of one shape come in numbers, and between two of them only the node changes that the first one was
//! bound to. The verdicts of filter also serve the prioritize call that follows. A new forecast invalidates
//! all verdicts at once. The nodes are therefore judged by it for recent shapes before it is adopted, so that
//! no call waits for that.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tessera_core::admission::{Admission, NodeMismatch, NodeOffer, PodQuery};
use tessera_core::forecast::Forecast;
use tessera_core::ledger::{NodePosition, Revision};
use tessera_core::placement::Policy;
use tessera_core::units::PodUid;
use tessera_wire::tessera::parsed_pod::{ParsedPod, RequestShape};

use super::sample::SampleMisses;
use crate::state::{State, StateId};

/// Shapes kept; the least recently used one is dropped first. A verdict takes 32 bytes, so 64 shapes of
/// 10,000 nodes take 20 MiB.
const MAX_SHAPES: usize = 64;

/// Shapes judged by a new forecast before it is adopted.
const MAX_PREPARED_SHAPES: usize = 16;

/// The verdicts by request shape.
#[derive(Debug, Default)]
pub struct VerdictCache {
    /// The most recently used shape is last.
    shapes: Mutex<Vec<ShapeVerdicts>>,
    misses: Mutex<SampleMisses>,
}

/// The verdicts of all nodes on pods of one shape.
#[derive(Debug)]
pub struct ShapeVerdicts {
    shape: RequestShape,
    /// The policy with its forecast or table. It is compared by address, and holding it keeps the address unique.
    policy: Policy,
    state: StateId,
    /// The verdicts by position of the node in the ledger.
    verdicts: Vec<CachedVerdict>,
}

#[derive(Clone, Copy, Debug)]
struct CachedVerdict {
    /// The node's revision at the time of the verdict; the default revision belongs to no node.
    revision: Revision,
    verdict: Result<f64, NodeMismatch>,
}

impl VerdictCache {
    /// Removes the verdicts for the pod's shape from the cache, so that concurrent calls do not wait for each
    /// other.
    pub(super) fn check_out(&self, state: &State, pod: &ParsedPod<'_>) -> ShapeVerdicts {
        let mut shapes = self.shapes();
        // Two concurrent calls may have left two entries. The later one is preferred.
        match shapes.iter().rposition(|shape| shape.applies_to(state, pod)) {
            Some(index) => shapes.remove(index),
            None => ShapeVerdicts {
                shape: pod.shape.clone(),
                policy: pod.policy.clone(),
                state: state.id().clone(),
                verdicts: Vec::new(),
            },
        }
    }

    /// Returns checked-out verdicts to the cache.
    pub(super) fn check_in(&self, verdicts: ShapeVerdicts) {
        self.insert([verdicts]);
    }

    /// Adds the verdicts of several shapes.
    pub fn insert(&self, added: impl IntoIterator<Item = ShapeVerdicts>) {
        let mut shapes = self.shapes();
        shapes.extend(added);
        let excess = shapes.len().saturating_sub(MAX_SHAPES);
        shapes.drain(..excess);
    }

    /// Returns the most recently used shapes without verdicts, to be judged by `forecast` before it is adopted.
    #[must_use]
    pub fn shapes_for(&self, forecast: &Arc<Forecast>) -> Vec<ShapeVerdicts> {
        let mut prepared: Vec<ShapeVerdicts> = Vec::new();
        for known in self.shapes().iter().rev().filter(|known| matches!(known.policy, Policy::Tessera(_))) {
            let is_prepared = prepared.iter().any(|other| other.shape.is_like(&known.shape));
            if prepared.len() < MAX_PREPARED_SHAPES && !is_prepared {
                prepared.push(ShapeVerdicts {
                    shape: known.shape.clone(),
                    policy: Policy::Tessera(Arc::clone(forecast)),
                    state: known.state.clone(),
                    verdicts: Vec::new(),
                });
            }
        }
        prepared.reverse();
        prepared
    }

    /// Counts a sample without a node that fits. Returns whether the pod should try another sample.
    pub(super) fn should_search_on(&self, pod: &PodUid) -> bool {
        self.misses.lock().unwrap_or_else(PoisonError::into_inner).should_search_on(pod)
    }

    fn shapes(&self) -> MutexGuard<'_, Vec<ShapeVerdicts>> {
        self.shapes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ShapeVerdicts {
    fn applies_to(&self, state: &State, pod: &ParsedPod<'_>) -> bool {
        is_same_policy(&self.policy, &pod.policy)
            && self.state == *state.id()
            && self.shape.is_like(&pod.shape)
    }

    /// Judges the nodes in this range of positions that have changed since their verdict.
    pub fn refresh(&mut self, state: &State, positions: Range<usize>) {
        for position in state.ledger().positions_in(positions) {
            let _cached = self.verdict(state, position);
        }
    }

    /// Returns the score of the node or the mismatch, without regard to quotas.
    pub(super) fn verdict(&mut self, state: &State, position: NodePosition) -> Result<f64, NodeMismatch> {
        let (index, revision) = (position.index(), state.ledger().changed(position));
        if index >= self.verdicts.len() {
            let none = CachedVerdict { revision: Revision::default(), verdict: Err(NodeMismatch::NotServed) };
            self.verdicts.resize(state.ledger().positions().max(index + 1), none);
        }
        if self.verdicts[index].revision != revision {
            self.verdicts[index] = CachedVerdict { revision, verdict: self.judge(state, position) };
        }
        self.verdicts[index].verdict
    }

    fn judge(&self, state: &State, position: NodePosition) -> Result<f64, NodeMismatch> {
        let node = state.readable_at(position).ok_or(NodeMismatch::NotServed)?;
        let request = self.shape.request(node.spec.unit);
        let service = node.service(state, &self.shape);
        let offer = NodeOffer { state: node.state, service, quota_labels: node.quota_labels };
        // No quota applies here, so the namespace is not read.
        let query = PodQuery { namespace: "", request: &request, policy: &self.policy };
        Admission { offer, query, quota: None }.cacheable_score()
    }
}

/// Returns whether two policies lead to the same verdicts.
fn is_same_policy(cached: &Policy, current: &Policy) -> bool {
    match (cached, current) {
        (Policy::Tessera(cached), Policy::Tessera(current)) => Arc::ptr_eq(cached, current),
        (Policy::Static(cached), Policy::Static(current)) => Arc::ptr_eq(cached, current),
        (Policy::Pair(cached), Policy::Pair(current)) => {
            is_same_policy(&cached.gpus, &current.gpus) && is_same_policy(&cached.nodes, &current.nodes)
        }
        (Policy::Pair(_), _) | (_, Policy::Pair(_)) => false,
        (cached, current) => cached.name() == current.name(),
    }
}
