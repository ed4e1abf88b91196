//! The gRPC services of a [`ClaimDriver`].

use std::{
    collections::HashMap,
    pin::Pin,
    sync::Arc,
    time::{Duration, SystemTime},
};

use tessera_wire::kubelet::{
    DRA_HEALTH_SERVICE, DRA_PLUGIN_TYPE, DRA_SERVICE,
    dra::{
        self as proto,
        dra_plugin_server::{DraPlugin, DraPluginServer},
    },
    dra_health::{
        self,
        dra_resource_health_server::{DraResourceHealth, DraResourceHealthServer},
    },
    plugin_registration::{
        self,
        registration_server::{Registration, RegistrationServer},
    },
};
use tokio::{sync::mpsc, task::JoinSet};
use tokio_stream::{Stream, wrappers::ReceiverStream};
use tokio_util::sync::CancellationToken;
use tonic::{
    Request, Response, Status,
    transport::{Server, server::Router},
};

use super::{ClaimDriver, ClaimReference, ClaimRefusal, DeviceHealth, PreparedDevice};

/// Interval at which the health is sent again. The kubelet forgets it after 30 seconds.
const HEALTH_INTERVAL: Duration = Duration::from_secs(10);

/// Answers the kubelet's calls for registration, claims and health.
#[derive(Debug)]
pub(super) struct Service<D> {
    pub(super) driver: Arc<D>,
    pub(super) name: Arc<str>,
    /// Path of the socket for claims and health.
    pub(super) endpoint: Arc<str>,
    /// Ends the health streams, which would otherwise prevent the server from stopping.
    pub(super) stop: CancellationToken,
}

// Implemented by hand, because `D` need not be `Clone`.
impl<D> Clone for Service<D> {
    fn clone(&self) -> Self {
        let Self { driver, name, endpoint, stop } = self;
        Self { driver: driver.clone(), name: name.clone(), endpoint: endpoint.clone(), stop: stop.clone() }
    }
}

impl<D: ClaimDriver> Service<D> {
    /// Returns a server for claims and health.
    pub(super) fn calls_router(&self) -> Router {
        Server::builder()
            .add_service(DraPluginServer::new(self.clone()))
            .add_service(DraResourceHealthServer::new(self.clone()))
    }

    /// Returns a server for the registration.
    pub(super) fn registration_router(&self) -> Router {
        Server::builder().add_service(RegistrationServer::new(self.clone()))
    }

    /// Calls `answer` for each claim at the same time, and returns the answers by UID.
    async fn for_each<T, F>(
        &self,
        claims: Vec<proto::Claim>,
        answer: impl Fn(Arc<D>, ClaimReference) -> F,
    ) -> HashMap<String, T>
    where
        T: Send + 'static,
        F: Future<Output = T> + Send + 'static,
    {
        let mut calls = JoinSet::new();
        for proto::Claim { namespace, uid, name } in claims {
            let answered = answer(self.driver.clone(), ClaimReference { uid: uid.clone(), namespace, name });
            calls.spawn(async move { (uid, answered.await) });
        }
        let mut answers = HashMap::new();
        while let Some(answered) = calls.join_next().await {
            // A claim without an answer is an error for the kubelet.
            answers.extend(answered);
        }
        answers
    }
}

#[tonic::async_trait]
impl<D: ClaimDriver> DraPlugin for Service<D> {
    async fn node_prepare_resources(
        &self,
        request: Request<proto::NodePrepareResourcesRequest>,
    ) -> Result<Response<proto::NodePrepareResourcesResponse>, Status> {
        let claims = self
            .for_each(request.into_inner().claims, |driver, claim| async move {
                match driver.prepare(claim).await {
                    Ok(devices) => proto::NodePrepareResourceResponse {
                        devices: devices.into_iter().map(device_message).collect(),
                        error: String::new(),
                    },
                    Err(ClaimRefusal(error)) => {
                        proto::NodePrepareResourceResponse { devices: Vec::new(), error }
                    }
                }
            })
            .await;
        Ok(Response::new(proto::NodePrepareResourcesResponse { claims }))
    }

    async fn node_unprepare_resources(
        &self,
        request: Request<proto::NodeUnprepareResourcesRequest>,
    ) -> Result<Response<proto::NodeUnprepareResourcesResponse>, Status> {
        let claims = self
            .for_each(request.into_inner().claims, |driver, claim| async move {
                let error = driver.unprepare(claim).await.err().map(|ClaimRefusal(error)| error);
                proto::NodeUnprepareResourceResponse { error: error.unwrap_or_default() }
            })
            .await;
        Ok(Response::new(proto::NodeUnprepareResourcesResponse { claims }))
    }
}

#[tonic::async_trait]
impl<D: ClaimDriver> DraResourceHealth for Service<D> {
    type NodeWatchResourcesStream =
        Pin<Box<dyn Stream<Item = Result<dra_health::NodeWatchResourcesResponse, Status>> + Send>>;

    async fn node_watch_resources(
        &self,
        _: Request<dra_health::NodeWatchResourcesRequest>,
    ) -> Result<Response<Self::NodeWatchResourcesStream>, Status> {
        let mut health = self.driver.health();
        let stop = self.stop.clone();
        let (messages, stream) = mpsc::channel(1);
        tokio::spawn(async move {
            loop {
                let devices = health.borrow_and_update().iter().map(health_message).collect();
                if messages.send(Ok(dra_health::NodeWatchResourcesResponse { devices })).await.is_err() {
                    return;
                }
                tokio::select! {
                    changed = health.changed() => if changed.is_err() { return },
                    () = tokio::time::sleep(HEALTH_INTERVAL) => {}
                    () = stop.cancelled() => return,
                    () = messages.closed() => return,
                }
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(stream))))
    }
}

#[tonic::async_trait]
impl<D: ClaimDriver> Registration for Service<D> {
    async fn get_info(
        &self,
        _: Request<plugin_registration::InfoRequest>,
    ) -> Result<Response<plugin_registration::PluginInfo>, Status> {
        Ok(Response::new(plugin_registration::PluginInfo {
            r#type: DRA_PLUGIN_TYPE.into(),
            name: self.name.to_string(),
            endpoint: self.endpoint.to_string(),
            supported_versions: vec![DRA_SERVICE.into(), DRA_HEALTH_SERVICE.into()],
        }))
    }

    async fn notify_registration_status(
        &self,
        request: Request<plugin_registration::RegistrationStatus>,
    ) -> Result<Response<plugin_registration::RegistrationStatusResponse>, Status> {
        let status = request.into_inner();
        if status.plugin_registered {
            tracing::info!(driver = %self.name, "registered the driver of claims with the kubelet");
        } else {
            tracing::error!(driver = %self.name, error = status.error, "the kubelet rejected the registration; pods cannot use claims of this driver");
        }
        Ok(Response::new(plugin_registration::RegistrationStatusResponse {}))
    }
}

fn device_message(device: PreparedDevice) -> proto::Device {
    proto::Device {
        request_names: vec![device.request],
        pool_name: device.pool,
        device_name: device.device,
        cdi_device_ids: device.cdi_names,
        share_id: device.share_id,
    }
}

fn health_message(device: &DeviceHealth) -> dra_health::DeviceHealth {
    let health = match device.problem {
        None => dra_health::HealthStatus::Healthy,
        Some(_) => dra_health::HealthStatus::Unhealthy,
    };
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    dra_health::DeviceHealth {
        device: Some(dra_health::DeviceIdentifier {
            pool_name: device.pool.clone(),
            device_name: device.device.clone(),
        }),
        health: health.into(),
        last_updated_time: i64::try_from(now.as_secs()).unwrap_or_default(),
        health_check_timeout_seconds: 0,
        message: device.problem.clone().unwrap_or_default(),
    }
}
