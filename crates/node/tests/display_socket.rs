//! gpu-manager's interface on a unix socket.

#![allow(clippy::unwrap_used, reason = "a failure fails the test")]

use std::os::unix::fs::PermissionsExt as _;

use tessera_node::display_socket::{DisplaySource, serve};
use tessera_wire::kubelet::gpu_manager_display::{
    ContainerStat, UsageResponse, gpu_display_client::GpuDisplayClient,
};
use tokio_util::sync::CancellationToken;
use tonic::{Code, transport::Endpoint};

struct Source;

impl DisplaySource for Source {
    async fn graph(&self) -> Option<String> {
        None
    }

    async fn usage(&self) -> Option<UsageResponse> {
        let pod = ContainerStat { user: "ann".into(), ..ContainerStat::default() };
        Some(UsageResponse { usage: [("uid".to_owned(), pod)].into() })
    }

    fn version(&self) -> String {
        "1".into()
    }
}

#[tokio::test]
async fn answers_as_gpu_manager_does() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("gpu-manager.sock");
    // An earlier process has left its socket.
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    let stop = CancellationToken::new();
    let server = tokio::spawn({
        let (path, stop) = (path.clone(), stop.clone());
        async move { serve(&path, Source, stop).await }
    });
    let channel = loop {
        let endpoint = Endpoint::try_from(format!("unix:{}", path.display())).unwrap();
        match endpoint.connect().await {
            Ok(channel) => break channel,
            Err(_) => tokio::task::yield_now().await,
        }
    };
    let mut client = GpuDisplayClient::new(channel);
    assert_eq!(client.version(()).await.unwrap().into_inner().version, "1");
    assert_eq!(client.print_usages(()).await.unwrap().into_inner().usage["uid"].user, "ann");
    assert_eq!(client.print_graph(()).await.unwrap_err().code(), Code::Unavailable);
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    drop(client);
    stop.cancel();
    server.await.unwrap().unwrap();
    assert!(!path.exists(), "the socket is left behind");
}
