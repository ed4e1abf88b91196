//! gpu-manager's gRPC service on a unix socket, for programs that read it.

use std::os::unix::fs::{FileTypeExt as _, PermissionsExt as _};
use std::{fs, io, path::Path};

use tessera_wire::kubelet::gpu_manager_display::{
    GraphResponse, UsageResponse, VersionResponse,
    gpu_display_server::{GpuDisplay, GpuDisplayServer},
};
use tokio::net::UnixListener;
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status, transport::Server};

use crate::file_identity::FileIdentity;

/// What the service shows.
pub trait DisplaySource: Send + Sync + 'static {
    /// Returns the GPUs as a tree, or `None` if they are not known yet.
    fn graph(&self) -> impl Future<Output = Option<String>> + Send;

    /// Returns what containers hold and use, or `None` if it is not known yet.
    fn usage(&self) -> impl Future<Output = Option<UsageResponse>> + Send;

    /// Returns the version of the program.
    fn version(&self) -> String;
}

struct Service<S>(S);

/// Serves at `path` until `stop`, for root only. A socket that an earlier process left there is replaced. At the end the
/// socket is removed, unless another process has replaced it.
///
/// # Errors
/// An error if the socket cannot be created or the server fails.
pub async fn serve(path: &Path, source: impl DisplaySource, stop: CancellationToken) -> io::Result<()> {
    if fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket()) {
        fs::remove_file(path)?;
    }
    let listener = UnixListener::bind(path)?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
    let identity = FileIdentity::of(path);
    let router = Server::builder().add_service(GpuDisplayServer::new(Service(source)));
    let served =
        router.serve_with_incoming_shutdown(UnixListenerStream::new(listener), stop.cancelled_owned());
    let served = served.await.map_err(io::Error::other);
    if FileIdentity::of(path) == identity {
        let _already_removed = fs::remove_file(path);
    }
    served
}

fn not_yet<T>(answer: Option<T>) -> Result<Response<T>, Status> {
    answer.map(Response::new).ok_or_else(|| Status::unavailable("the GPUs of this node are not known yet"))
}

#[tonic::async_trait]
impl<S: DisplaySource> GpuDisplay for Service<S> {
    async fn print_graph(&self, _: Request<()>) -> Result<Response<GraphResponse>, Status> {
        not_yet(self.0.graph().await.map(|graph| GraphResponse { graph }))
    }

    async fn print_usages(&self, _: Request<()>) -> Result<Response<UsageResponse>, Status> {
        not_yet(self.0.usage().await)
    }

    async fn version(&self, _: Request<()>) -> Result<Response<VersionResponse>, Status> {
        Ok(Response::new(VersionResponse { version: self.0.version() }))
    }
}
