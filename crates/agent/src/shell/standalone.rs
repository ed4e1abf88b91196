//! The exporter without Kubernetes: GPUs and processes are told as far as the machine itself knows them.

use std::sync::Arc;

use tessera_core::{
    node::{Node, NodeState},
    units::{MiB, MilliCpu, NodeName},
};
use tessera_node::gpus::{Gpus, GpusError};
use tokio::{net::TcpListener, sync::mpsc};
use tokio_util::sync::CancellationToken;

use super::{Message, Messages, Sampler, Sampling, http};
use crate::{controller::View, exporter::Snapshot};

/// The exporter alone.
#[allow(missing_debug_implementations, reason = "a port is whatever is plugged in")]
pub struct Standalone {
    view: View,
    sampler: Arc<Sampler>,
}

/// There is nothing to tell.
#[derive(Debug, thiserror::Error)]
pub enum StandaloneError {
    /// No GPUs.
    #[error(transparent)]
    Gpus(#[from] GpusError),
    /// A description that cannot be.
    #[error(transparent)]
    Node(#[from] tessera_core::node::BadNode),
}

impl Standalone {
    /// Begins to look at the GPUs of this machine.
    pub fn start(node: NodeName, gpus: Arc<dyn Gpus>, sampling: Sampling) -> Result<Self, StandaloneError> {
        let found = gpus.discover()?;
        let node = Node::new(node, found.gpus, found.topology, MilliCpu(u64::MAX), MiB(u64::MAX))?;
        let view = View {
            node: Some(NodeState::empty(Arc::new(node))),
            pci: found.pci,
            driver: found.driver,
            ..View::default()
        };
        let sampler = Arc::new(Sampler::new(gpus, sampling));
        sampler.learn(&view);
        Ok(Self { view, sampler })
    }

    /// Everything there is to tell now.
    #[must_use]
    pub fn picture(&self) -> Snapshot {
        self.sampler.picture(&self.view)
    }

    /// Serves the pages until `stop`.
    pub async fn serve(self, listener: TcpListener, stop: CancellationToken) {
        let (messages, mut inbox): (Messages, _) = mpsc::unbounded_channel();
        let served = http::serve(listener, messages, self.sampler, stop);
        let view = self.view;
        let answers = async move {
            while let Some(message) = inbox.recv().await {
                match message {
                    Message::Inspect(waiting) => {
                        let _left = waiting.send(view.clone());
                    }
                    // Nobody else is waited for.
                    Message::IsReady(waiting) => {
                        let _left = waiting.send(Ok(()));
                    }
                    Message::Event(_) | Message::Call(..) => {}
                }
            }
        };
        tokio::select! {
            () = served => {}
            () = answers => {}
        }
    }
}
