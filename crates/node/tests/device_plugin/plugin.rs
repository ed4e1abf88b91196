//! A plugin with two devices, and helpers to wait.

use std::{future::Future, path::Path, sync::Arc, time::Duration};

use tessera_node::device_plugin::{
    Allocation, DevicePlugin, PluginDevice, PluginRefusal, PreferenceRequest, RegistrationMode, ServedPlugin,
    serve,
};
use tokio::{sync::watch, task::JoinHandle};
use tokio_util::sync::CancellationToken;
use tonic::transport::{Channel, Endpoint};

pub(crate) const RESOURCE: &str = "tessera.dev/test";

/// File name of the socket of [`RESOURCE`].
pub(crate) const SOCKET: &str = "tessera.dev-test.sock";

pub(crate) struct Plugin {
    pub(crate) devices: watch::Sender<Vec<PluginDevice>>,
}

impl DevicePlugin for Plugin {
    fn devices(&self) -> watch::Receiver<Vec<PluginDevice>> {
        self.devices.subscribe()
    }

    async fn prefer(&self, wish: PreferenceRequest) -> Result<Vec<String>, PluginRefusal> {
        let rest = wish.available.into_iter().filter(|id| !wish.required.contains(id));
        Ok(wish.required.iter().cloned().chain(rest).take(wish.count).collect())
    }

    async fn allocate(&self, ids: Vec<String>) -> Result<Allocation, PluginRefusal> {
        if ids.iter().any(|id| id == "broken") {
            return Err(PluginRefusal("this GPU is broken".into()));
        }
        Ok(Allocation { envs: [("IDS".to_owned(), ids.join(","))].into(), ..Allocation::default() })
    }

    async fn pre_start(&self, _: Vec<String>) -> Result<(), PluginRefusal> {
        Ok(())
    }
}

/// A plugin that is being served.
pub(crate) struct Running {
    pub(crate) plugin: Arc<Plugin>,
    stop: CancellationToken,
    task: JoinHandle<()>,
}

impl Running {
    pub(crate) fn start(registration: RegistrationMode) -> Self {
        let device = |id: &str| PluginDevice { id: id.into(), healthy: id != "broken", numa_node: Some(1) };
        let plugin = Arc::new(Plugin { devices: watch::Sender::new(vec![device("good"), device("broken")]) });
        let stop = CancellationToken::new();
        let served = ServedPlugin { plugin: plugin.clone(), resource: RESOURCE.into(), registration };
        let stopped = stop.clone();
        let task = tokio::spawn(async move { serve(served, stopped).await.unwrap() });
        Self { plugin, stop, task }
    }

    pub(crate) async fn stop(self) {
        self.stop.cancel();
        with_timeout("the plugin to stop", self.task).await.unwrap();
    }
}

/// Waits for a future and panics after 20 seconds.
pub(crate) async fn with_timeout<F: Future>(what: &str, future: F) -> F::Output {
    let waited = tokio::time::timeout(Duration::from_secs(20), future).await;
    waited.unwrap_or_else(|_| panic!("timed out waiting for {what}"))
}

/// Connects to a socket as soon as a server listens on it.
pub(crate) async fn dial(socket: &Path) -> Channel {
    let endpoint = Endpoint::from_shared(format!("unix://{}", socket.display())).unwrap();
    with_timeout("the socket", async {
        loop {
            match endpoint.connect().await {
                Ok(channel) => return channel,
                Err(_not_yet) => tokio::time::sleep(Duration::from_millis(5)).await,
            }
        }
    })
    .await
}
