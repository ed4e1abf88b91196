//! Which nodes will do, and why the others will not.

use std::collections::BTreeMap;

use tessera_core::units::NodeName;
use tessera_wire::extender::{Args, FilterResult};

use super::ask::Ask;
use super::reason::Reason;
use crate::state::State;

/// The verdict on every node that was asked about.
#[derive(Clone, Debug, Default)]
pub struct Verdicts {
    /// Those that fit, in the order asked.
    pub fitting: Vec<String>,
    /// Why others do not; evictions might help.
    pub failed: BTreeMap<String, String>,
    /// Why others do not, whoever goes.
    pub unresolvable: BTreeMap<String, String>,
    /// How often each kind of reason came up.
    pub reasons: BTreeMap<&'static str, u64>,
}

impl State {
    /// Judges every node. `nodes` of the answer is for whoever has the whole nodes.
    #[must_use]
    pub fn filter(&self, args: &mut Args) -> Verdicts {
        let names = take_names(args);
        let mut verdicts = Verdicts::default();
        let ask = match Ask::of(self, &args.pod) {
            Ok(ask) => ask,
            Err(bad) => {
                let text = bad.to_string();
                verdicts.reasons.insert("bad-request", names.len() as u64);
                verdicts.unresolvable = names.into_iter().map(|name| (name, text.clone())).collect();
                return verdicts;
            }
        };
        if !ask.wants_gpu() {
            verdicts.fitting = names;
            return verdicts;
        }
        verdicts.fitting.reserve(names.len());
        // Nodes mostly fail alike: the words are made once.
        let mut last: Option<(Reason, String)> = None;
        for name in names {
            let name = NodeName(name);
            let Err(reason) = self.fits(&name, &ask) else {
                verdicts.fitting.push(name.0);
                continue;
            };
            *verdicts.reasons.entry(reason.kind()).or_default() += 1;
            let map = if reason.may_resolve() { &mut verdicts.failed } else { &mut verdicts.unresolvable };
            let text = match &last {
                Some((known, text)) if *known == reason => text.clone(),
                _ => last.insert((reason.clone(), reason.to_string())).1.clone(),
            };
            map.insert(name.0, text);
        }
        verdicts
    }
}

impl Verdicts {
    /// As kube-scheduler reads it, for a question by names.
    #[must_use]
    pub fn into_result(self) -> FilterResult {
        FilterResult {
            nodes: None,
            node_names: Some(self.fitting),
            failed_nodes: self.failed,
            failed_and_unresolvable_nodes: self.unresolvable,
            error: String::new(),
        }
    }
}

/// The names asked about, moved out of the question.
pub(super) fn take_names(args: &mut Args) -> Vec<String> {
    let mut names = args.node_names.take().unwrap_or_default();
    let whole = args.nodes.take().map(|list| list.items).unwrap_or_default();
    names.extend(whole.into_iter().map(|node| node.metadata.name));
    names
}
