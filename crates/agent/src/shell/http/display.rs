//! gpu-manager's gRPC service, with the same answers as the pages.

use std::{path::PathBuf, sync::Arc};

use tessera_node::display_socket::{self, DisplaySource};
use tessera_wire::kubelet::gpu_manager_display::UsageResponse;
use tokio_util::sync::CancellationToken;

use super::{Pages, tree};
use crate::{
    exporter,
    shell::{Messages, sampler::Sampler},
};

/// Serves gpu-manager's interface at `path` until `stop`.
pub(in crate::shell) async fn serve(
    path: PathBuf,
    messages: Messages,
    sampler: Arc<Sampler>,
    stop: CancellationToken,
) {
    if let Err(error) =
        display_socket::serve(&path, Pages { messages, sampler, certificate: None }, stop).await
    {
        tracing::error!(
            socket = %path.display(), %error,
            "cannot serve gpu-manager's interface; its readers get no answer until the agent restarts"
        );
    }
}

impl DisplaySource for Pages {
    async fn graph(&self) -> Option<String> {
        tree(self).await.ok()
    }

    async fn usage(&self) -> Option<UsageResponse> {
        Some(exporter::gpu_manager_usage(&self.snapshot().await.ok()?).into())
    }

    fn version(&self) -> String {
        env!("CARGO_PKG_VERSION").to_owned()
    }
}
