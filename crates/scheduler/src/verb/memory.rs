//! Verdicts remembered: a node is judged anew for a kind of pod only after the node has changed.
//!
//! Pods of one kind come in numbers, and between two of them one node changes, the one the first was bound to. Filter's
//! verdicts also serve the prioritize that follows it.

use std::sync::{Arc, Mutex, PoisonError};

use tessera_core::forecast::Forecast;
use tessera_core::ledger::{Ledger, Moment, Position};
use tessera_core::placement::static_table::StaticTable;
use tessera_core::placement::{Policy, Refusal, score};
use tessera_core::request::PodRequest;
use tessera_wire::dialect::MemoryUnit;

use super::ask::Ask;
use super::judge::weigh;
use crate::state::State;

/// Kinds remembered at most; the one not asked for the longest is forgotten first. A verdict takes 32 bytes: of 10,000
/// nodes these are 20 MiB.
const MOST_KINDS: usize = 64;

/// What nodes said to kinds of pods, for one state and as long as it is the same. Starts empty.
#[derive(Debug, Default)]
pub struct Memory(Mutex<Vec<Kind>>);

/// A kind of pod, and what nodes say to it.
#[derive(Debug)]
pub(super) struct Kind {
    request: PodRequest,
    policy: Policy,
    basis: Basis,
    /// By the node's position in the ledger.
    verdicts: Vec<Remembered>,
}

/// What scores rest on besides the node: kept, so that nothing else is ever found at the same address.
#[derive(Clone, Debug)]
struct Basis {
    forecast: Arc<Forecast>,
    table: Arc<StaticTable>,
}

#[derive(Clone, Copy, Debug)]
struct Remembered {
    /// The node's last change before the verdict; of no node where there is none.
    at: Moment,
    verdict: Result<f64, Refusal>,
}

/// The kinds of one pod: what it asks for depends on what a node counts memory in.
#[derive(Debug)]
pub(super) struct Kinds {
    gib: Kind,
    mib: Option<Kind>,
}

impl Memory {
    /// What is remembered for a pod, taken out: two calls at a time do not wait for each other.
    pub(super) fn take(&self, state: &State, ask: &Ask<'_>) -> Kinds {
        let (gib, mib) = (ask.request(MemoryUnit::GiB), ask.request(MemoryUnit::MiB));
        Kinds {
            gib: self.take_kind(state, gib, &ask.policy),
            mib: (gib != mib).then(|| self.take_kind(state, mib, &ask.policy)),
        }
    }

    /// To remember.
    pub(super) fn put(&self, kinds: Kinds) {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        known.extend([kinds.gib].into_iter().chain(kinds.mib));
        let too_many = known.len().saturating_sub(MOST_KINDS);
        known.drain(..too_many);
    }

    fn take_kind(&self, state: &State, request: &PodRequest, policy: &Policy) -> Kind {
        let basis =
            Basis { forecast: Arc::clone(state.current_forecast()), table: Arc::clone(state.table()) };
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        known.retain(|kind| kind.basis.is(&basis));
        let is_it = |kind: &Kind| kind.request == *request && kind.policy.name() == policy.name();
        // The latest, where two calls at a time left two.
        match known.iter().rposition(is_it) {
            Some(place) => known.remove(place),
            None => Kind { request: request.clone(), policy: policy.clone(), basis, verdicts: Vec::new() },
        }
    }
}

impl Kinds {
    /// How well the node suits, or why it does not, as far as its cards go.
    pub(super) fn verdict(
        &mut self,
        ledger: &Ledger,
        position: Position,
        unit: MemoryUnit,
    ) -> Result<f64, Refusal> {
        match (unit, &mut self.mib) {
            (MemoryUnit::MiB, Some(mib)) => mib.verdict(ledger, position),
            _ => self.gib.verdict(ledger, position),
        }
    }
}

impl Kind {
    fn verdict(&mut self, ledger: &Ledger, position: Position) -> Result<f64, Refusal> {
        let (index, now) = (position.index(), ledger.changed(position));
        if index >= self.verdicts.len() {
            let nothing = Remembered { at: Moment::default(), verdict: Err(Refusal::NoGpu) };
            self.verdicts.resize(ledger.positions().max(index + 1), nothing);
        }
        let known = &mut self.verdicts[index];
        if known.at != now {
            let node = ledger.at(position).ok_or(Refusal::NoGpu)?;
            let verdict = score(node, &weigh(node, &self.request), &self.policy);
            *known = Remembered { at: now, verdict };
        }
        known.verdict
    }
}

impl Basis {
    fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.forecast, &other.forecast) && Arc::ptr_eq(&self.table, &other.table)
    }
}
