//! A gRPC server on a unix socket.

use std::{fs, io, path::PathBuf};

use tokio::{net::UnixListener, task::JoinHandle};
use tokio_stream::{StreamExt, wrappers::UnixListenerStream};
use tokio_util::sync::CancellationToken;
use tonic::transport::server::Router;

use super::connection::Connection;
use crate::file_identity::FileIdentity;

/// A socket that is being served.
#[derive(Debug)]
pub(crate) struct Endpoint {
    path: PathBuf,
    identity: Option<FileIdentity>,
    stop: CancellationToken,
    server: JoinHandle<Result<(), tonic::transport::Error>>,
}

impl Endpoint {
    /// Serves at `path` and replaces a socket that an earlier process left there.
    /// The server runs until `stop`, which also ends with this endpoint.
    pub(crate) fn open(path: PathBuf, stop: CancellationToken, router: Router) -> io::Result<Self> {
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let listener = UnixListener::bind(&path)?;
        let identity = FileIdentity::of(&path);
        let stopped = stop.clone().cancelled_owned();
        let connections = UnixListenerStream::new(listener).map(|accepted| accepted.map(Connection::new));
        let server = tokio::spawn(router.serve_with_incoming_shutdown(connections, stopped));
        Ok(Self { path, identity, stop, server })
    }

    /// Returns whether the socket can still be reached by its path. A starting kubelet deletes all
    /// sockets.
    pub(crate) fn is_intact(&self) -> bool {
        self.identity.is_some() && FileIdentity::of(&self.path) == self.identity && !self.server.is_finished()
    }

    /// Stops the server, waits for its end, and removes the socket unless another process has
    /// replaced it.
    pub(crate) async fn close(self) {
        self.stop.cancel();
        if let Ok(Err(error)) = self.server.await {
            tracing::warn!(socket = %self.path.display(), %error, "the gRPC server of the socket failed; the socket is opened again");
        }
        if FileIdentity::of(&self.path) == self.identity {
            let _already_removed = fs::remove_file(&self.path);
        }
    }
}
