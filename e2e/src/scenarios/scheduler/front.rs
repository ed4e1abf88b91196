//! What a Service is in a cluster: one address that leads to the replica that is ready.

use std::{
    net::SocketAddr,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use anyhow::Result;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt, copy_bidirectional},
    net::{TcpListener, TcpStream},
    time::{sleep, timeout},
};

/// How often replicas are asked; in a cluster the shipped readiness probe does it every second.
const ASK_EVERY: Duration = Duration::from_millis(200);

pub(super) struct Front {
    pub(super) address: SocketAddr,
    replicas: Arc<Mutex<Vec<SocketAddr>>>,
}

impl Front {
    pub(super) async fn start(replicas: Vec<SocketAddr>) -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let replicas = Arc::new(Mutex::new(replicas));
        let known = Arc::clone(&replicas);
        tokio::spawn(async move {
            while let Ok((mut client, _)) = listener.accept().await {
                let known = Arc::clone(&known);
                tokio::spawn(async move {
                    if let Some(mut server) = connect(&known).await {
                        // Small packets both ways: waiting to fill them would cost 40 ms each.
                        let _ = (client.set_nodelay(true), server.set_nodelay(true));
                        let _ended = copy_bidirectional(&mut client, &mut server).await;
                    }
                });
            }
        });
        Ok(Self { address, replicas })
    }

    pub(super) fn add(&self, replica: SocketAddr) {
        self.replicas.lock().unwrap_or_else(PoisonError::into_inner).push(replica);
    }
}

/// A connection to the replica that is ready, waiting a moment for one.
async fn connect(replicas: &Mutex<Vec<SocketAddr>>) -> Option<TcpStream> {
    for _ in 0..20 {
        let known = replicas.lock().unwrap_or_else(PoisonError::into_inner).clone();
        for address in known {
            if is_ready(address).await {
                return TcpStream::connect(address).await.ok();
            }
        }
        sleep(ASK_EVERY).await;
    }
    None
}

pub(super) async fn is_ready(address: SocketAddr) -> bool {
    get(address, "/readyz").await.is_some_and(|answer| answer.starts_with("HTTP/1.1 200"))
}

/// The whole answer to a GET.
pub(super) async fn get(address: SocketAddr, path: &str) -> Option<String> {
    let ask = async {
        let mut stream = TcpStream::connect(address).await.ok()?;
        let request = format!("GET {path} HTTP/1.1\r\nhost: tessera\r\nconnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.ok()?;
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).await.ok()?;
        Some(String::from_utf8_lossy(&answer).into_owned())
    };
    timeout(Duration::from_secs(2), ask).await.ok().flatten()
}
