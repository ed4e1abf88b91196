//! A driver of claims on real sockets, called as the kubelet calls it.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a failure fails the test")]

use std::{path::Path, sync::Arc, time::Duration};

use tessera_node::dra::{
    ClaimDriver, ClaimReference, ClaimRefusal, DeviceHealth, PreparedDevice, ServedDriver, serve,
};
use tessera_wire::kubelet::{
    dra::{
        Claim, NodePrepareResourcesRequest, NodeUnprepareResourcesRequest, dra_plugin_client::DraPluginClient,
    },
    dra_health::{
        HealthStatus, NodeWatchResourcesRequest, dra_resource_health_client::DraResourceHealthClient,
    },
    plugin_registration::{InfoRequest, registration_client::RegistrationClient},
};
use tokio::{sync::watch, time::timeout};
use tokio_util::sync::CancellationToken;
use tonic::transport::{Channel, Endpoint};

const DRIVER: &str = "gpu.example.com";

struct Driver {
    health: watch::Sender<Vec<DeviceHealth>>,
}

impl ClaimDriver for Driver {
    fn health(&self) -> watch::Receiver<Vec<DeviceHealth>> {
        self.health.subscribe()
    }

    async fn prepare(&self, claim: ClaimReference) -> Result<Vec<PreparedDevice>, ClaimRefusal> {
        if claim.name == "bad" {
            return Err(ClaimRefusal("the GPU is full".into()));
        }
        Ok(vec![PreparedDevice {
            request: "gpu".into(),
            pool: "n1".into(),
            device: "gpu-0".into(),
            cdi_names: vec![format!("example.com/claim={}", claim.uid)],
            share_id: Some("s".into()),
        }])
    }

    async fn unprepare(&self, _: ClaimReference) -> Result<(), ClaimRefusal> {
        Ok(())
    }
}

async fn dial(socket: &Path) -> Channel {
    let endpoint = Endpoint::from_shared(format!("unix://{}", socket.display())).unwrap();
    timeout(Duration::from_secs(30), async {
        loop {
            match endpoint.connect().await {
                Ok(channel) => return channel,
                Err(_not_yet) => tokio::task::yield_now().await,
            }
        }
    })
    .await
    .expect("the socket is served")
}

fn claim(name: &str) -> Claim {
    Claim { namespace: "team".into(), uid: format!("uid-of-{name}"), name: name.into() }
}

#[tokio::test]
async fn the_kubelet_finds_the_driver_and_prepares_claims() {
    let root = tempfile::tempdir().unwrap();
    let (registry, plugins) = (root.path().join("plugins_registry"), root.path().join("plugins"));
    std::fs::create_dir(&registry).unwrap();
    let health = |problem: Option<&str>| {
        vec![DeviceHealth { pool: "n1".into(), device: "gpu-0".into(), problem: problem.map(str::to_owned) }]
    };
    let driver = Arc::new(Driver { health: watch::Sender::new(health(None)) });
    let stop = CancellationToken::new();
    let served =
        ServedDriver { driver: driver.clone(), name: DRIVER.into(), registry: registry.clone(), plugins };
    let serving = tokio::spawn(serve(served, stop.clone()));

    let registration = registry.join("gpu.example.com-reg.sock");
    let info = RegistrationClient::new(dial(&registration).await).get_info(InfoRequest {}).await.unwrap();
    let info = info.into_inner();
    assert_eq!((info.r#type.as_str(), info.name.as_str()), ("DRAPlugin", DRIVER));
    assert_eq!(info.supported_versions, ["v1.DRAPlugin", "v1alpha1.DRAResourceHealth"]);
    let endpoint = Path::new(&info.endpoint);
    assert!(endpoint.is_absolute());

    let mut client = DraPluginClient::new(dial(endpoint).await);
    let claims = vec![claim("good"), claim("bad")];
    let request = NodePrepareResourcesRequest { claims: claims.clone() };
    let answer = client.node_prepare_resources(request).await.unwrap().into_inner().claims;
    assert_eq!(answer.len(), 2, "every claim is answered");
    assert_eq!(answer["uid-of-bad"].error, "the GPU is full");
    let device = &answer["uid-of-good"].devices[0];
    assert_eq!(device.request_names, ["gpu"]);
    assert_eq!(device.cdi_device_ids, ["example.com/claim=uid-of-good"]);
    assert_eq!(device.share_id.as_deref(), Some("s"));
    let request = NodeUnprepareResourcesRequest { claims };
    let answer = client.node_unprepare_resources(request).await.unwrap().into_inner().claims;
    assert_eq!(answer.values().filter(|one| one.error.is_empty()).count(), 2);

    let mut watching = DraResourceHealthClient::new(dial(endpoint).await);
    let mut stream = watching.node_watch_resources(NodeWatchResourcesRequest {}).await.unwrap().into_inner();
    let first = stream.message().await.unwrap().unwrap();
    assert_eq!(first.devices[0].health, i32::from(HealthStatus::Healthy));
    driver.health.send_replace(health(Some("XID 79")));
    let second = stream.message().await.unwrap().unwrap();
    assert_eq!(second.devices[0].health, i32::from(HealthStatus::Unhealthy));
    assert_eq!(second.devices[0].message, "XID 79");

    // A kubelet that starts removes all sockets.
    std::fs::remove_file(&registration).unwrap();
    dial(&registration).await;
    stop.cancel();
    serving.await.unwrap().unwrap();
    assert!(!registration.exists());
}
