//! A device plugin that forwards the kubelet's calls to the controller and returns its answers.

use std::sync::atomic::{AtomicU64, Ordering};

use tessera_node::device_plugin::{Allocation, DevicePlugin, PluginDevice, PluginRefusal, PreferenceRequest};
use tessera_wire::kubelet::device_id::Resource;
use tokio::sync::{oneshot, watch};

use super::{Message, Messages};
use crate::controller::{CallAnswer, CallError, CallId, Event};

/// Next call ID of all plugins.
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

    /// Publishes the devices if they have changed. The kubelet rewrites its checkpoint with every list.
    pub(super) fn publish(&self, devices: Vec<PluginDevice>) {
        self.devices.send_if_modified(|known| {
            let has_changed = *known != devices;
            *known = devices;
            has_changed
        });
    }

    async fn ask(&self, event: impl FnOnce(CallId) -> Event) -> Result<CallAnswer, PluginRefusal> {
        ask(&self.messages, event).await.map_err(PluginRefusal)
    }
}

/// Sends a call of the kubelet to the controller and returns the answer, or why there is none.
pub(super) async fn ask(
    messages: &Messages,
    event: impl FnOnce(CallId) -> Event,
) -> Result<CallAnswer, String> {
    let (reply, answer) = oneshot::channel();
    let call = CallId(CALLS.fetch_add(1, Ordering::Relaxed));
    let ended = || "the agent is stopping; the pod is admitted after its restart".to_owned();
    messages.send(Message::Call(event(call), call, reply)).map_err(|_| ended())?;
    answer.await.map_err(|_| ended())
}

fn refusal(error: CallError) -> PluginRefusal {
    PluginRefusal(error.to_string())
}

/// Text for an answer that does not belong to its call.
pub(super) const WRONG_ANSWER: &str = "internal error: the controller answered another call";

fn wrong_answer() -> PluginRefusal {
    PluginRefusal(WRONG_ANSWER.to_owned())
}

impl DevicePlugin for Plugin {
    fn devices(&self) -> watch::Receiver<Vec<PluginDevice>> {
        let _ended = self.messages.send(Message::Event(Event::StreamOpened(self.resource)));
        self.devices.subscribe()
    }

    async fn prefer(&self, request: PreferenceRequest) -> Result<Vec<String>, PluginRefusal> {
        match self.ask(|call| Event::Prefer(call, self.resource, request)).await? {
            CallAnswer::Preferred(answer) => answer.map_err(refusal),
            _ => Err(wrong_answer()),
        }
    }

    async fn allocate(&self, ids: Vec<String>) -> Result<Allocation, PluginRefusal> {
        let ids = ids.into_iter().collect();
        match self.ask(|call| Event::Allocate(call, self.resource, ids)).await? {
            CallAnswer::Allocated(answer) => answer.map(|allocation| *allocation).map_err(refusal),
            _ => Err(wrong_answer()),
        }
    }

    async fn pre_start(&self, ids: Vec<String>) -> Result<(), PluginRefusal> {
        let ids = ids.into_iter().collect();
        match self.ask(|call| Event::PreStart(call, self.resource, ids)).await? {
            CallAnswer::Started(answer) => answer.map_err(refusal),
            _ => Err(wrong_answer()),
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::mpsc;

    use super::*;

    #[tokio::test]
    async fn calls_are_refused_while_the_agent_stops() {
        let (messages, mut inbox) = mpsc::unbounded_channel();
        let plugin = Plugin::new(Resource::VcudaCore, messages);
        // The shell drops the calls that wait, and then its inbox.
        let stop = async {
            let Some(Message::Call(_, _, reply)) = inbox.recv().await else { panic!("not a call") };
            drop((reply, inbox));
        };
        let (waiting, ()) = tokio::join!(plugin.allocate(Vec::new()), stop);
        for refused in [waiting, plugin.allocate(Vec::new()).await] {
            let reason = refused.unwrap_err().0;
            assert_eq!(reason, "the agent is stopping; the pod is admitted after its restart");
        }
    }
}
