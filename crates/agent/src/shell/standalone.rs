//! The exporter without Kubernetes. It reports GPUs and processes as far as the host itself knows them.

use std::sync::Arc;

use tessera_core::{
    node::{Node, NodeState},
    units::{MiB, MilliCpu, NodeName},
};
use tessera_node::gpus::{Gpus, GpusError};
use tokio::{net::TcpListener, sync::mpsc};
use tokio_util::sync::CancellationToken;

use super::{Message, Messages, PagesAccess, PagesPort, Sampler, Sampling, http};
use crate::{controller::View, exporter::Snapshot};

/// The exporter without an agent.
#[allow(missing_debug_implementations, reason = "a port is whatever is plugged in")]
pub struct Standalone {
    view: View,
    sampler: Arc<Sampler>,
}

/// Reason why the exporter cannot start.
#[derive(Debug, thiserror::Error)]
pub enum StandaloneError {
    /// The GPUs could not be discovered.
    #[error(transparent)]
    Gpus(#[from] GpusError),
    /// The description of the GPUs is inconsistent.
    #[error(transparent)]
    Node(#[from] tessera_core::node::BadNode),
}

impl Standalone {
    /// Starts to sample the GPUs of this host.
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
        sampler.update(&view);
        Ok(Self { view, sampler })
    }

    /// Returns the current state of the host.
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        self.sampler.snapshot(&self.view)
    }

    /// Serves the pages to everyone until `stop`: without Kubernetes there are no tokens to check.
    pub async fn serve(self, listener: TcpListener, stop: CancellationToken) {
        let (messages, mut inbox): (Messages, _) = mpsc::unbounded_channel();
        let pages = PagesPort { listener, access: PagesAccess::Open };
        let served = http::serve(pages, messages, self.sampler, stop);
        let view = self.view;
        let answers = async move {
            while let Some(message) = inbox.recv().await {
                match message {
                    Message::Inspect(reply) => {
                        let _disconnected = reply.send(view.clone());
                    }
                    // The standalone exporter depends on no other component.
                    Message::IsReady(reply) => {
                        let _disconnected = reply.send(Ok(()));
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
