//! The agent's decisions, without IO: events go in, actions come out.
//!
//! The shell passes events to [`Agent::handle`] and carries out the returned actions in order. The
//! controller never waits and never reads a clock. [`Agent::next_wake`] says when it needs the next
//! [`Event::Tick`].

mod action;
mod admission;
mod allocate;
mod answers;
mod availability;
mod bad_annotations;
mod calls;
mod capacity;
mod devices;
mod diagnostics;
mod dra;
mod error;
mod event;
mod grants;
mod handlers;
mod health;
mod holdings;
mod identify;
mod inventory;
mod isolation;
mod kubelet;
mod ledger_cache;
mod limits;
mod loans;
mod mig;
mod other_plugins;
mod over_time;
mod overruns;
mod pods;
mod pre_start;
mod publications;
mod reconcile;
mod settings;
mod throttle_cycle;
mod unknown_keys;
mod usage_check;
mod usage_sample;
mod view;
mod warning;

#[cfg(test)]
mod tests;

use std::time::Duration;

use tessera_core::{ledger::Ledger, units::PodUid};

pub use self::{
    action::{Action, CallAnswer},
    dra::{ClaimError, ClaimFiles},
    error::{CallError, DeviceMismatch, LibraryError, NotEnforceable, NotReady, ShellError, Undecided},
    event::{CallId, Event, EventTime, WriteError},
    health::{IncidentEffect, incident_effect},
    isolation::{InstalledLibrary, Isolation, NotEnforced, OPT_OUT, OnEscape, WithoutLibrary},
    limits::ContainerLimits,
    mig::{InstanceOffer, MigStrategy},
    publications::NodePatch,
    settings::{AgentSettings, ClaimSettings},
    throttle_cycle::DutyCycle,
    usage_sample::{
        AccountSample, ContainerTime, Escape, GpuProcess, LibraryMapping, PodContainer, ProcessState,
        TimeTotals, UsageSample,
    },
    view::{ClaimView, ClaimedGpu, ContainerView, PodView, View},
    warning::Warning,
};
use self::{
    admission::Admissions, availability::Availability, bad_annotations::BadAnnotations, calls::PendingCalls,
    capacity::Capacity, diagnostics::Diagnostics, dra::Claims, grants::GrantDirectories, holdings::Holdings,
    inventory::GpuInventory, kubelet::KubeletView, ledger_cache::LedgerCache, loans::Loans,
    other_plugins::OtherPlugins, overruns::AccountOverruns, pods::Pods, publications::NodePublication,
    reconcile::PodPatches, usage_check::UsageCheck,
};

/// State of a node's agent. Each part keeps its own state; the agent passes events between them.
#[derive(Debug)]
pub struct Agent {
    settings: AgentSettings,
    /// GPUs as discovered and as offered.
    inventory: GpuInventory,
    /// What the API server has reported.
    pods: Pods,
    /// What the kubelet has reported.
    kubelet: KubeletView,
    /// Calls of the kubelet that wait for an answer.
    calls: PendingCalls,
    /// Answers that were given to the kubelet.
    admissions: Admissions,
    /// Sum of all holdings.
    ledger: LedgerCache,
    /// Devices that are withdrawn because other dialects hold their GPUs, or because the GPUs are cordoned.
    capacity: Capacity,
    /// Claims that are prepared on this node.
    claims: Claims,
    /// Limits that were written for containers.
    grants: GrantDirectories,
    /// Annotations that were written to pods.
    patches: PodPatches,
    /// What was written to the node's object.
    publication: NodePublication,
    diagnostics: Diagnostics,
    /// Whether schedulers may bind pods to the node.
    availability: Availability,
    /// Other device plugins for resources of this agent.
    other_plugins: OtherPlugins,
    usage: UsageCheck,
    overruns: AccountOverruns,
    bad_annotations: BadAnnotations,
    /// Memory that containers have borrowed.
    loans: Loans,
    /// Number of changes of pods and GPUs.
    revision: u64,
    /// Reports that came up while a call was answered. They follow the answer.
    notices: Vec<Action>,
}

impl Agent {
    /// Returns an agent that has not seen any event.
    #[must_use]
    pub fn new(settings: AgentSettings) -> Self {
        Self {
            inventory: GpuInventory::new(&settings),
            claims: Claims::new(settings.claims.is_some()),
            settings,
            pods: Pods::default(),
            kubelet: KubeletView::default(),
            calls: PendingCalls::default(),
            admissions: Admissions::default(),
            ledger: LedgerCache::default(),
            capacity: Capacity::default(),
            grants: GrantDirectories::default(),
            patches: PodPatches::default(),
            publication: NodePublication::default(),
            diagnostics: Diagnostics::default(),
            availability: Availability::default(),
            other_plugins: OtherPlugins::default(),
            usage: UsageCheck::default(),
            overruns: AccountOverruns::default(),
            bad_annotations: BadAnnotations::default(),
            loans: Loans::default(),
            revision: 0,
            notices: Vec::new(),
        }
    }

    /// Takes in an event and returns what the shell must do.
    pub fn handle(&mut self, now: EventTime, event: Event) -> Vec<Action> {
        let mut actions = Vec::new();
        let is_tick = matches!(event, Event::Tick);
        let dirty = self.apply(now, event, &mut actions);
        self.reconcile_capacity(now, is_tick, &mut actions);
        if !matches!(dirty, Dirty::Nothing) {
            self.retry_calls(now, &mut actions);
        }
        match &dirty {
            Dirty::Nothing | Dirty::Node => {}
            Dirty::Pod(uid) => self.reconcile_pods(now, Some(uid), &mut actions),
            Dirty::Pods | Dirty::All => self.reconcile_pods(now, None, &mut actions),
        }
        let is_withheld_changed = self.reconcile_withheld();
        if matches!(dirty, Dirty::Node | Dirty::All) || is_withheld_changed {
            let (phase, withheld) = (self.availability.phase(), self.other_plugins.withheld());
            let gpus = self.inventory.gpus();
            self.publication.reconcile(now, &self.settings, (phase, withheld), gpus, &mut actions);
        }
        self.reconcile_slice(now, &mut actions);
        self.continue_stop(now, &mut actions);
        actions.append(&mut self.notices);
        actions
    }

    /// Returns when to send the next tick at the latest, or `None` if the routine ticks suffice.
    #[must_use]
    pub fn next_wake(&self) -> Option<Duration> {
        (!self.calls.is_empty()).then_some(calls::RETRY_INTERVAL)
    }

    /// Returns a number that changes whenever pods or GPUs change.
    #[must_use]
    pub fn revision(&self) -> u64 {
        self.revision
    }

    /// Notes that pods, GPUs or the kubelet's list have changed.
    fn invalidate(&mut self) {
        self.ledger.invalidate();
        self.capacity.invalidate();
        self.revision += 1;
    }

    fn holdings(&self) -> Holdings<'_> {
        holdings(&self.settings, &self.inventory, &self.pods, &self.kubelet, &self.admissions, &self.claims)
    }

    /// Returns the sum of all holdings of this node.
    fn ledger(&mut self) -> Ledger {
        let holdings = holdings(
            &self.settings,
            &self.inventory,
            &self.pods,
            &self.kubelet,
            &self.admissions,
            &self.claims,
        );
        self.ledger.current(holdings)
    }
}

/// Returns a view of who holds what. It borrows only the parts it reads.
fn holdings<'a>(
    settings: &'a AgentSettings,
    inventory: &'a GpuInventory,
    pods: &'a Pods,
    kubelet: &'a KubeletView,
    admissions: &'a Admissions,
    claims: &'a Claims,
) -> Holdings<'a> {
    Holdings { node: &settings.node, gpus: inventory.gpus(), pods, kubelet, admissions, claims }
}

/// Published state that an event has made stale and that must be written again.
enum Dirty {
    Nothing,
    /// State of one pod.
    Pod(PodUid),
    /// State of any pod.
    Pods,
    /// State of the node.
    Node,
    All,
}
