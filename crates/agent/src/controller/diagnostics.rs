//! Who should be there and is not: the node in the cluster, the kubelet on the node. Without them nothing fails and nothing
//! works, so it is said: once, and again only after something has changed.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    time::Duration,
};

use tessera_node::device_plugin::RegistrationMode;
use tessera_wire::kubelet::device_id::Resource;

use super::{Action, Agent, EventTime};

/// How long a kubelet may keep us waiting: it takes some seconds to restart.
const PATIENCE: Duration = Duration::from_secs(30);

#[derive(Debug, Default)]
pub(super) struct Absent {
    /// Whether the cluster has no node of our name.
    pub(super) node: bool,
    /// What the kubelet lacks, since when, and whether that was said.
    kubelet: Option<(Lack, Duration, bool)>,
    /// Why plugins have no socket.
    without_socket: BTreeMap<Resource, String>,
}

/// What a kubelet has not done.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Lack {
    /// Anything at all.
    Everything,
    /// Ask for the devices of these resources.
    Asking(BTreeSet<Resource>),
    /// Tell its pod resources.
    Listing,
}

impl Absent {
    /// The kubelet has come to the socket of a plugin: there is one.
    pub(super) fn has_socket(&mut self, resource: Resource) {
        self.without_socket.remove(&resource);
    }
}

impl Agent {
    /// The API server knows no node of our name.
    pub(super) fn on_node_missing(&mut self, actions: &mut Vec<Action>) {
        self.published.gone();
        if !std::mem::replace(&mut self.absent.node, true) {
            let says = self.no_node();
            actions.push(Action::Warn(format!(
                "{says}: its GPUs are not announced and no pod can be served. Give the name that kubectl get nodes \
                 shows, by --node-name or NODE_NAME"
            )));
        }
    }

    pub(super) fn no_node(&self) -> String {
        format!("the cluster has no node named {}", self.settings.node)
    }

    /// A plugin has no socket; it is tried again.
    pub(super) fn on_without_socket(
        &mut self,
        resource: Resource,
        reason: String,
        actions: &mut Vec<Action>,
    ) {
        if self.absent.without_socket.get(&resource) != Some(&reason) {
            actions.push(Action::Warn(format!("{reason}; will try again")));
            self.absent.without_socket.insert(resource, reason);
        }
    }

    /// Says what the kubelet lacks, once it has lacked it for long.
    pub(super) fn look_for_kubelet(&mut self, now: EventTime, actions: &mut Vec<Action>) {
        let Some(lack) = self.lack_of_kubelet() else {
            self.absent.kubelet = None;
            return;
        };
        match &mut self.absent.kubelet {
            Some((known, since, said)) if *known == lack => {
                if !*said && now.elapsed >= *since + PATIENCE {
                    *said = true;
                    actions.push(Action::Warn(self.describe_lack(&lack)));
                }
            }
            _ => self.absent.kubelet = Some((lack, now.elapsed, false)),
        }
    }

    /// `None` also while there is nothing to offer.
    fn lack_of_kubelet(&self) -> Option<Lack> {
        self.cards.as_ref()?;
        let lists = self.listed_once && self.calls.list_failure().is_none();
        let unasked: BTreeSet<Resource> =
            self.resources().filter(|resource| !self.asked_for.contains(resource)).collect();
        match (lists, unasked.is_empty()) {
            (true, true) => None,
            (true, false) => Some(Lack::Asking(unasked)),
            (false, _) if self.asked_for.is_empty() => Some(Lack::Everything),
            (false, _) => Some(Lack::Listing),
        }
    }

    fn describe_lack(&self, lack: &Lack) -> String {
        let seconds = PATIENCE.as_secs();
        match lack {
            Lack::Everything => {
                let place = match &self.settings.registration {
                    RegistrationMode::PluginsRegistry(directory) => {
                        format!("has come to {}", directory.display())
                    }
                    RegistrationMode::KubeletSocket(directory) => {
                        format!("has answered at {}", directory.join("kubelet.sock").display())
                    }
                };
                format!(
                    "no kubelet {place} for {seconds} s: no pod gets GPUs here. --kubelet-root names the kubelet's root \
                     directory (its own --root-dir); in a pod that directory must be mounted under the same name"
                )
            }
            Lack::Asking(resources) => {
                let names: Vec<&str> = resources.iter().map(|resource| resource.name()).collect();
                let other = match &self.settings.registration {
                    RegistrationMode::PluginsRegistry(_) => "kubelet-socket",
                    RegistrationMode::KubeletSocket(_) => "plugins-registry",
                };
                format!(
                    "the kubelet has not asked for the devices of {} for {seconds} s: pods that want them are turned \
                     away. Its log tells why; --registration {other} is the other way to reach it",
                    names.join(", ")
                )
            }
            Lack::Listing => {
                let mut text = format!(
                    "the kubelet has not told its pod resources for {seconds} s: pods that want GPUs are turned away"
                );
                if let Some(reason) = self.calls.list_failure() {
                    let _always_works = write!(text, ". {reason}");
                }
                text
            }
        }
    }
}
