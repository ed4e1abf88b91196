//! A plugin that connects to the kubelet, again after each restart of the kubelet.

use std::{
    fs,
    path::{Path, PathBuf},
};

use tessera_node::device_plugin::RegistrationMode;
use tessera_wire::kubelet::device_plugin::{
    self as proto, Empty, RegisterRequest,
    device_plugin_client::DevicePluginClient,
    registration_server::{Registration, RegistrationServer},
};
use tokio::{net::UnixListener, sync::mpsc, task::JoinHandle};
use tokio_stream::wrappers::UnixListenerStream;
use tonic::{Request, Response, Status, transport::Server};

use crate::plugin::{RESOURCE, Running, SOCKET, dial, with_timeout};

/// A simulated kubelet. As a real one does when it starts, it deletes all sockets and then listens.
struct Kubelet {
    directory: PathBuf,
    registrations: mpsc::UnboundedReceiver<RegisterRequest>,
    server: JoinHandle<()>,
}

struct Registrar(mpsc::UnboundedSender<RegisterRequest>);

#[tonic::async_trait]
impl Registration for Registrar {
    async fn register(&self, request: Request<RegisterRequest>) -> Result<Response<Empty>, Status> {
        self.0.send(request.into_inner()).map_err(|_| Status::unavailable("stopping"))?;
        Ok(Response::new(Empty {}))
    }
}

impl Kubelet {
    fn start(directory: &Path) -> Self {
        for entry in fs::read_dir(directory).unwrap() {
            fs::remove_file(entry.unwrap().path()).unwrap();
        }
        let listener = UnixListener::bind(directory.join("kubelet.sock")).unwrap();
        let (sender, registrations) = mpsc::unbounded_channel();
        let router = Server::builder().add_service(RegistrationServer::new(Registrar(sender)));
        let server = tokio::spawn(async move {
            router.serve_with_incoming(UnixListenerStream::new(listener)).await.unwrap();
        });
        Self { directory: directory.into(), registrations, server }
    }

    /// Waits for a registration, connects to the plugin, and returns its devices.
    async fn registered(&mut self) -> Vec<proto::Device> {
        let request = with_timeout("a registration", self.registrations.recv()).await.unwrap();
        assert_eq!((request.version.as_str(), request.resource_name.as_str()), ("v1beta1", RESOURCE));
        assert_eq!(request.endpoint, SOCKET);
        let options = request.options.unwrap();
        assert!(options.pre_start_required && options.get_preferred_allocation_available);
        let mut plugin = DevicePluginClient::new(dial(&self.directory.join(request.endpoint)).await);
        let mut devices = plugin.list_and_watch(Empty {}).await.unwrap().into_inner();
        devices.message().await.unwrap().unwrap().devices
    }
}

impl Drop for Kubelet {
    fn drop(&mut self) {
        self.server.abort();
    }
}

#[tokio::test]
async fn registers_again_after_a_restart_of_the_kubelet() {
    let directory = tempfile::tempdir().unwrap();
    let mut kubelet = Kubelet::start(directory.path());
    let running = Running::start(RegistrationMode::KubeletSocket(directory.path().into()));
    assert_eq!(kubelet.registered().await.len(), 2);
    for _ in 0..3 {
        drop(kubelet);
        kubelet = Kubelet::start(directory.path());
        assert_eq!(kubelet.registered().await.len(), 2);
    }
    running.stop().await;
}

#[tokio::test]
async fn waits_for_a_kubelet_that_is_not_running_yet() {
    let directory = tempfile::tempdir().unwrap();
    let running = Running::start(RegistrationMode::KubeletSocket(directory.path().into()));
    tokio::task::yield_now().await;
    let mut kubelet = Kubelet::start(directory.path());
    assert_eq!(kubelet.registered().await.len(), 2);
    running.stop().await;
}
