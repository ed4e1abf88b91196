//! Warnings about a missing peer: the node in the cluster, or the kubelet on the node.
//!
//! Without them nothing fails and nothing works. So each is logged once, and again only after
//! something has changed.

use std::{collections::BTreeMap, time::Duration};

use tessera_node::device_plugin::RegistrationMode;
use tessera_wire::kubelet::device_id::Resource;

use super::{Action, AgentSettings, EventTime, ShellError, Warning, kubelet::KubeletView};

/// How long the kubelet may be missing before a warning. A restart takes it some seconds. The texts of
/// the warnings repeat the number.
const KUBELET_TIMEOUT: Duration = Duration::from_secs(30);

/// Missing peers, and which warnings have been logged.
#[derive(Debug, Default)]
pub(super) struct Diagnostics {
    is_node_missing: bool,
    kubelet: Option<MissingKubelet>,
    /// Why plugins have no socket.
    socket_errors: BTreeMap<Resource, String>,
}

#[derive(Debug)]
struct MissingKubelet {
    lack: KubeletLack,
    since: Duration,
    is_logged: bool,
}

/// What the kubelet has not done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum KubeletLack {
    /// The kubelet has not connected at all.
    Everything,
    /// The kubelet has not opened the device streams of these resources.
    Streams(Vec<String>),
    /// The kubelet does not list its podresources.
    List,
}

impl Diagnostics {
    /// Returns whether the cluster has no node of the agent's name.
    pub(super) fn is_node_missing(&self) -> bool {
        self.is_node_missing
    }

    pub(super) fn node_found(&mut self) {
        self.is_node_missing = false;
    }

    /// Notes that the API server has no node of the agent's name.
    pub(super) fn node_missing(&mut self, settings: &AgentSettings, actions: &mut Vec<Action>) {
        if !std::mem::replace(&mut self.is_node_missing, true) {
            let message = "the cluster has no node of this name: its GPUs are not announced and no pod can be served; \
                           set --node-name or NODE_NAME to a name that kubectl get nodes shows";
            actions.push(Action::Warn(Warning::new(message).node(&settings.node)));
        }
    }

    /// Notes that the kubelet has connected to the socket of a plugin.
    pub(super) fn socket_works(&mut self, resource: Resource) {
        self.socket_errors.remove(&resource);
    }

    /// Notes that a plugin cannot create its socket.
    pub(super) fn socket_failed(&mut self, resource: Resource, reason: String, actions: &mut Vec<Action>) {
        if self.socket_errors.get(&resource) != Some(&reason) {
            let warning = Warning::new("cannot create the socket of a device plugin, will try again");
            actions.push(Action::Warn(warning.detail(resource.name().to_owned()).error(&reason)));
            self.socket_errors.insert(resource, reason);
        }
    }

    /// Logs what the kubelet lacks, once it has lacked it for [`KUBELET_TIMEOUT`].
    pub(super) fn check_kubelet(
        &mut self,
        now: EventTime,
        settings: &AgentSettings,
        lack: Option<KubeletLack>,
        list_error: Option<&ShellError>,
        actions: &mut Vec<Action>,
    ) {
        let Some(lack) = lack else {
            self.kubelet = None;
            return;
        };
        match &mut self.kubelet {
            Some(missing) if missing.lack == lack => {
                if !missing.is_logged && now.elapsed >= missing.since + KUBELET_TIMEOUT {
                    missing.is_logged = true;
                    actions.push(Action::Warn(warning(&lack, settings, list_error)));
                }
            }
            _ => self.kubelet = Some(MissingKubelet { lack, since: now.elapsed, is_logged: false }),
        }
    }
}

impl KubeletLack {
    /// Returns what the kubelet has not done. `closed` are the resources whose device streams it has not opened.
    pub(super) fn of(
        kubelet: &KubeletView,
        closed: Vec<String>,
        list_error: Option<&ShellError>,
    ) -> Option<Self> {
        let lists = kubelet.has_listed() && list_error.is_none();
        match (lists, closed.is_empty()) {
            (true, true) => None,
            (true, false) => Some(Self::Streams(closed)),
            (false, _) if !kubelet.has_any_stream() => Some(Self::Everything),
            (false, _) => Some(Self::List),
        }
    }
}

fn warning(lack: &KubeletLack, settings: &AgentSettings, list_error: Option<&ShellError>) -> Warning {
    match lack {
        KubeletLack::Everything => {
            let socket = match &settings.registration {
                RegistrationMode::PluginsRegistry(directory) => directory.clone(),
                RegistrationMode::KubeletSocket(directory) => directory.join("kubelet.sock"),
            };
            let message = "no kubelet has connected for 30 s: no pod gets GPUs here; --kubelet-root names the \
                           kubelet's root directory (its own --root-dir), which a pod must mount under the same path";
            Warning::new(message).detail(socket.display().to_string())
        }
        KubeletLack::Streams(resources) => {
            let names: Vec<&str> = resources.iter().map(String::as_str).collect();
            let message = match &settings.registration {
                RegistrationMode::PluginsRegistry(_) => {
                    "the kubelet has not asked for the devices of some resources for 30 s: it rejects pods that \
                     request them; its log says why, and --registration kubelet-socket is the other way to reach it"
                }
                RegistrationMode::KubeletSocket(_) => {
                    "the kubelet has not asked for the devices of some resources for 30 s: it rejects pods that \
                     request them; its log says why, and --registration plugins-registry is the other way to reach it"
                }
            };
            Warning::new(message).detail(names.join(", "))
        }
        KubeletLack::List => {
            let message =
                "the kubelet has not listed its pod resources for 30 s: pods that request GPUs are refused";
            let warning = Warning::new(message);
            match list_error {
                Some(error) => warning.error(error),
                None => warning,
            }
        }
    }
}
