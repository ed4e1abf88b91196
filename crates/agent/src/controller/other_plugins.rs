//! Other device plugins of the node for a resource of this agent, such as NVIDIA's for `nvidia.com/gpu`.
//!
//! The kubelet sends its calls to the plugin that registered last, takes device lists from both, and disconnects the later
//! one when the stream of the earlier one ends. So the agent leaves a resource to a later plugin without closing its own
//! stream: it sends no more lists. A call of the kubelet shows that the agent serves the resource again.
//!
//! The other plugin does not know which GPUs pods of other dialects hold, and could give these GPUs away again. While
//! there are such pods, the resource is withheld: schedulers bind no more pods that request it to this node.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tessera_core::units::PodUid;
use tessera_wire::{foreign::dialect::Dialect, kubelet::device_id::Resource};

use super::{Action, Agent, EventTime, Warning, holdings::PodHoldings, pods::has_ended};

/// Interval at which the kubelet's devices are compared with those of this agent.
const CHECK_INTERVAL: Duration = Duration::from_secs(10);

/// Signs of other plugins.
#[derive(Debug, Default)]
pub(super) struct OtherPlugins {
    checked: Duration,
    /// Devices that the kubelet offered at the last check although this agent does not.
    foreign: BTreeMap<Resource, BTreeSet<String>>,
    /// Pods that this agent has seen before the kubelet admitted them.
    arriving: BTreeSet<PodUid>,
    /// Resources that schedulers must not use on this node.
    withheld: Vec<String>,
}

impl OtherPlugins {
    /// Returns the resources that schedulers must not use on this node.
    pub(super) fn withheld(&self) -> &[String] {
        &self.withheld
    }
}

impl Agent {
    /// Asks for the kubelet's devices of whole GPUs if a check is due. Units of shares are too many to compare.
    pub(super) fn request_due_check(&mut self, now: EventTime, actions: &mut Vec<Action>) {
        let Some(gpus) = self.inventory.gpus() else { return };
        let is_open = |of: &Resource| gpus.ids.is_whole(*of) && self.kubelet.has_stream(of.name());
        let resources: BTreeSet<Resource> = self.settings.resources().filter(is_open).collect();
        if now.elapsed >= self.other_plugins.checked + CHECK_INTERVAL && !resources.is_empty() {
            self.other_plugins.checked = now.elapsed;
            actions.push(Action::ReadOfferedDevices(resources));
        }
    }

    /// Compares the kubelet's devices with those of this agent. A device that twice in a row is none of this agent's has
    /// come from another plugin; once it may be a list that the kubelet has not taken in yet.
    pub(super) fn on_devices_offered(
        &mut self,
        offered: BTreeMap<Resource, BTreeSet<String>>,
        actions: &mut Vec<Action>,
    ) {
        let mut foreign = BTreeMap::new();
        for (resource, ids) in offered {
            let ours = self.inventory.healthy_devices(resource, self.capacity.published());
            foreign
                .insert(resource, ids.into_iter().filter(|id| !ours.contains(id)).collect::<BTreeSet<_>>());
        }
        let before = std::mem::replace(&mut self.other_plugins.foreign, foreign);
        let lasting = |(of, ids): (&Resource, &BTreeSet<String>)| {
            let is_same = before.get(of).is_some_and(|earlier| !earlier.is_disjoint(ids));
            is_same.then_some(*of)
        };
        let taken: Vec<Resource> = self.other_plugins.foreign.iter().filter_map(lasting).collect();
        for resource in taken {
            self.leave(resource, actions);
        }
    }

    /// Notes that a pod has come or changed.
    pub(super) fn note_arrival(&mut self, uid: &PodUid) {
        let requests = self.pods.parsed(uid).is_some_and(|parsed| !parsed.claims.is_empty());
        let Some(pod) = self.pods.get(uid) else { return };
        let is_new = pod.status.start_time.is_none() && !has_ended(pod);
        // Pods of the first list were admitted before, perhaps by an earlier agent.
        if is_new && requests && self.kubelet.has_listed() && self.holdings().entry_of(uid, pod).is_none() {
            self.other_plugins.arriving.insert(uid.clone());
        }
    }

    /// Leaves resources to another plugin if the kubelet has given devices of them to a new pod without a call.
    pub(super) fn find_bypassed_calls(&mut self, actions: &mut Vec<Action>) {
        let mut taken = BTreeSet::new();
        let mut arriving = std::mem::take(&mut self.other_plugins.arriving);
        arriving.retain(|uid| {
            let Some(pod) = self.pods.get(uid).filter(|pod| !has_ended(pod)) else { return false };
            if pod.status.start_time.is_none() {
                return true;
            }
            let Some(entry) = self.holdings().entry_of(uid, pod) else { return true };
            for container in &entry.containers {
                let given = |of: &Resource| container.ids.get(of.name()).is_some_and(|ids| !ids.is_empty());
                let is_recorded =
                    |of: &Resource| self.admissions.recorded(uid, &container.name, *of).is_some();
                taken.extend(self.settings.resources().filter(|of| given(of) && !is_recorded(of)));
            }
            false
        });
        self.other_plugins.arriving = arriving;
        for resource in taken {
            self.leave(resource, actions);
        }
    }

    /// Leaves a resource, and with it its dialect, to another plugin.
    fn leave(&mut self, resource: Resource, actions: &mut Vec<Action>) {
        let is_left = |dialect: &Dialect| Resource::of(*dialect).any(|of| of == resource);
        let dialects = std::mem::take(&mut self.settings.dialects);
        let (left, kept): (Vec<Dialect>, Vec<Dialect>) = dialects.into_iter().partition(is_left);
        self.settings.dialects = kept;
        if left.is_empty() {
            return;
        }
        self.settings.left_to_others.extend(left);
        let message = "another device plugin has taken over this resource, so the agent leaves it alone and serves \
                       the others; remove that plugin and restart the agent, or leave this dialect out of --dialects";
        actions.push(Action::Warn(Warning::new(message).detail(resource.name().to_owned())));
    }

    /// Serves a resource again that was left to another plugin, because the kubelet has called this agent for it.
    pub(super) fn serve_again(&mut self, resource: Resource, actions: &mut Vec<Action>) {
        let is_back = |dialect: &Dialect| Resource::of(*dialect).any(|of| of == resource);
        let left = std::mem::take(&mut self.settings.left_to_others);
        let (back, left): (Vec<Dialect>, Vec<Dialect>) = left.into_iter().partition(is_back);
        self.settings.left_to_others = left;
        if back.is_empty() {
            return;
        }
        self.settings.dialects.extend(back);
        let message = "the kubelet calls this agent again for a resource that another device plugin had taken over, so the \
                       agent offers its devices again";
        actions.push(Action::Warn(Warning::new(message).detail(resource.name().to_owned())));
        self.inventory.publish_devices(self.settings.resources(), self.capacity.published(), actions);
    }

    /// Decides again which resources are withheld. Returns true if that has changed.
    pub(super) fn reconcile_withheld(&mut self) -> bool {
        let left = &self.settings.left_to_others;
        let is_known = self.pods.is_complete() && self.kubelet.has_listed();
        if (left.is_empty() && self.other_plugins.withheld.is_empty()) || !is_known {
            return false;
        }
        let of_left = |dialect: Dialect| {
            left.iter()
                .flat_map(|left| Resource::of(*left))
                .any(|of| Resource::of(dialect).any(|other| other == of))
        };
        let holdings = self.holdings();
        let holds_more = |pod: &PodHoldings<'_>| pod.containers.iter().any(|held| !of_left(held.dialect));
        let has_claims =
            || holdings.gpus.is_some_and(|gpus| holdings.claims.grants(holdings.node, gpus).next().is_some());
        let is_withheld = !left.is_empty() && (holdings.all().iter().any(holds_more) || has_claims());
        let names = left.iter().flat_map(|left| Resource::of(*left)).filter(|_| is_withheld);
        let withheld: BTreeSet<String> = names.map(|resource| resource.name().to_owned()).collect();
        let withheld = Vec::from_iter(withheld);
        let has_changed = withheld != self.other_plugins.withheld;
        self.other_plugins.withheld = withheld;
        has_changed
    }
}
