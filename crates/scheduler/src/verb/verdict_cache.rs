//! Verdicts remembered: a node is judged anew for a kind of pod only after the node has changed.
//!
//! Pods of one kind come in numbers, and between two of them one node changes, the one the first was bound to. Filter's
//! verdicts also serve the prioritize that follows it. A new forecast changes all of them at once: nodes are judged by it for
//! the kinds that come, before it is adopted, so that nobody waits for that.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use tessera_core::admission::{RejectReason, weigh};
use tessera_core::forecast::Forecast;
use tessera_core::ledger::{NodePosition, Revision};
use tessera_core::placement::{PlacementError, Policy, score};
use tessera_wire::tessera::parsed_pod::RequestShape;

use super::ask::ParsedPod;
use super::node_hint::NodeHint;
use crate::state::{ReadableNode, State, StateId};

/// Kinds remembered at most; the one not asked for the longest is forgotten first. A verdict takes 32 bytes: of 10,000
/// nodes these are 20 MiB.
const MOST_KINDS: usize = 64;

/// Kinds judged by a new forecast before anybody asks.
const JUDGED_AHEAD: usize = 16;

/// What nodes said to kinds of pods, and in which order they were asked. Starts empty.
#[derive(Debug, Default)]
pub struct VerdictCache {
    kinds: Mutex<Vec<ShapeVerdicts>>,
    hint: Mutex<NodeHint>,
}

/// A kind of pod, and what nodes say to it.
#[derive(Debug)]
pub struct ShapeVerdicts {
    shape: RequestShape,
    /// With what it rests on; kept, so that nothing else is ever found at the same address.
    policy: Policy,
    /// Whose nodes.
    of: StateId,
    /// By the node's position in the ledger.
    verdicts: Vec<CachedVerdict>,
}

/// Why a node will not do, as far as that is remembered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unfit {
    NotServed,
    Cards(PlacementError),
}

#[derive(Clone, Copy, Debug)]
struct CachedVerdict {
    /// The node's last change before the verdict; of no node where there is none.
    at: Revision,
    verdict: Result<f64, Unfit>,
}

impl VerdictCache {
    /// What is remembered of a pod's kind, and the way to its nodes: taken out, so that two calls at a time do not wait for each
    /// other.
    pub(super) fn take(&self, state: &State, ask: &ParsedPod<'_>) -> (ShapeVerdicts, NodeHint) {
        let mut known = self.kinds.lock().unwrap_or_else(PoisonError::into_inner);
        // The latest, where two calls at a time left two.
        let kind = match known.iter().rposition(|kind| kind.is_for(state, ask)) {
            Some(place) => known.remove(place),
            None => ShapeVerdicts {
                shape: ask.shape.clone(),
                policy: ask.policy.clone(),
                of: state.identity().clone(),
                verdicts: Vec::new(),
            },
        };
        drop(known);
        (kind, std::mem::take(&mut *self.hint.lock().unwrap_or_else(PoisonError::into_inner)))
    }

    /// To remember.
    pub(super) fn put_back(&self, kind: ShapeVerdicts, hint: NodeHint) {
        self.put([kind]);
        *self.hint.lock().unwrap_or_else(PoisonError::into_inner) = hint;
    }

    /// Remembers these kinds too.
    pub fn put(&self, kinds: impl IntoIterator<Item = ShapeVerdicts>) {
        let mut known = self.kinds.lock().unwrap_or_else(PoisonError::into_inner);
        known.extend(kinds);
        let too_many = known.len().saturating_sub(MOST_KINDS);
        known.drain(..too_many);
    }

    /// The kinds asked for last, to be judged by this forecast instead of the one they were judged by.
    #[must_use]
    pub fn under(&self, forecast: &Arc<Forecast>) -> Vec<ShapeVerdicts> {
        let known = self.kinds.lock().unwrap_or_else(PoisonError::into_inner);
        let mut kinds: Vec<ShapeVerdicts> = Vec::new();
        for kind in known.iter().rev().filter(|kind| matches!(kind.policy, Policy::Tessera(_))) {
            if kinds.len() < JUDGED_AHEAD && !kinds.iter().any(|other| other.shape.is_like(&kind.shape)) {
                let policy = Policy::Tessera(Arc::clone(forecast));
                let (shape, of) = (kind.shape.clone(), kind.of.clone());
                kinds.push(ShapeVerdicts { shape, policy, of, verdicts: Vec::new() });
            }
        }
        kinds.reverse();
        kinds
    }
}

impl ShapeVerdicts {
    fn is_for(&self, state: &State, ask: &ParsedPod<'_>) -> bool {
        let same_policy = match (&self.policy, &ask.policy) {
            (Policy::Tessera(known), Policy::Tessera(asked)) => Arc::ptr_eq(known, asked),
            (Policy::Static(known), Policy::Static(asked)) => Arc::ptr_eq(known, asked),
            (known, asked) => known.name() == asked.name(),
        };
        same_policy && self.of == *state.identity() && self.shape.is_like(&ask.shape)
    }

    /// Judges those of these nodes that have changed since they were.
    pub fn judge(&mut self, state: &State, indices: Range<usize>) {
        for position in state.ledger().positions_in(indices) {
            let _cached = self.verdict(state, position);
        }
    }

    /// How well the node suits, or why it does not; quotas are not looked at.
    pub(super) fn verdict(&mut self, state: &State, position: NodePosition) -> Result<f64, Unfit> {
        let (index, now) = (position.index(), state.ledger().changed(position));
        if index >= self.verdicts.len() {
            let nothing = CachedVerdict { at: Revision::default(), verdict: Err(Unfit::NotServed) };
            self.verdicts.resize(state.ledger().positions().max(index + 1), nothing);
        }
        if self.verdicts[index].at != now {
            self.verdicts[index] = CachedVerdict { at: now, verdict: self.afresh(state, position) };
        }
        self.verdicts[index].verdict
    }

    fn afresh(&self, state: &State, position: NodePosition) -> Result<f64, Unfit> {
        let node = state.readable_at(position).filter(|node| node.spec.serves(self.shape.dialects));
        let ReadableNode { spec, state, .. } = node.ok_or(Unfit::NotServed)?;
        let request = self.shape.request(spec.unit);
        score(state, &weigh(state, &request), &self.policy).map_err(Unfit::Cards)
    }
}

impl From<Unfit> for RejectReason {
    fn from(unfit: Unfit) -> Self {
        match unfit {
            Unfit::NotServed => Self::NotServed,
            Unfit::Cards(refusal) => Self::Placement(refusal),
        }
    }
}
