//! One device plugin: passes the kubelet's questions on and the answers back.

use std::sync::atomic::{AtomicU64, Ordering};

use tessera_node::device_plugin::{Allocation, DevicePlugin, PluginDevice, PluginRefusal, PreferenceRequest};
use tessera_wire::kubelet::device_id::Resource;
use tokio::sync::{oneshot, watch};

use super::{Message, Messages};
use crate::controller::{CallAnswer, CallError, CallId, Event};

/// Numbers of questions, for all plugins together.
static CALLS: AtomicU64 = AtomicU64::new(0);

pub(super) struct Plugin {
    resource: Resource,
    devices: watch::Sender<Vec<PluginDevice>>,
    messages: Messages,
}

impl Plugin {
    pub(super) fn new(resource: Resource, messages: Messages) -> Self {
        Self { resource, devices: watch::Sender::new(Vec::new()), messages }
    }

    /// The kubelet writes its books anew with every list it gets: only news is sent.
    pub(super) fn publish(&self, devices: Vec<PluginDevice>) {
        self.devices.send_if_modified(|known| {
            let news = *known != devices;
            *known = devices;
            news
        });
    }

    async fn ask(&self, event: impl FnOnce(CallId) -> Event) -> Result<CallAnswer, PluginRefusal> {
        let (answer, waiting) = oneshot::channel();
        let call = CallId(CALLS.fetch_add(1, Ordering::Relaxed));
        let ended = || PluginRefusal("the agent is ending".to_owned());
        self.messages.send(Message::Call(event(call), call, answer)).map_err(|_| ended())?;
        waiting.await.map_err(|_| ended())
    }
}

fn refusal(error: CallError) -> PluginRefusal {
    PluginRefusal(error.to_string())
}

fn confused() -> PluginRefusal {
    PluginRefusal("the agent answered another question".to_owned())
}

impl DevicePlugin for Plugin {
    fn devices(&self) -> watch::Receiver<Vec<PluginDevice>> {
        let _ended = self.messages.send(Message::Event(Event::StreamOpened(self.resource)));
        self.devices.subscribe()
    }

    async fn prefer(&self, wish: PreferenceRequest) -> Result<Vec<String>, PluginRefusal> {
        match self.ask(|call| Event::Prefer(call, self.resource, wish)).await? {
            CallAnswer::Preferred(answer) => answer.map_err(refusal),
            _ => Err(confused()),
        }
    }

    async fn allocate(&self, ids: Vec<String>) -> Result<Allocation, PluginRefusal> {
        let ids = ids.into_iter().collect();
        match self.ask(|call| Event::Allocate(call, self.resource, ids)).await? {
            CallAnswer::Allocated(answer) => answer.map(|allocation| *allocation).map_err(refusal),
            _ => Err(confused()),
        }
    }

    async fn pre_start(&self, ids: Vec<String>) -> Result<(), PluginRefusal> {
        let ids = ids.into_iter().collect();
        match self.ask(|call| Event::PreStart(call, self.resource, ids)).await? {
            CallAnswer::Started(answer) => answer.map_err(refusal),
            _ => Err(confused()),
        }
    }
}
