{{/* The PodSpec of a router or a node. */}}
{{- define "corun.podSpec" -}}
{{- $root := .root }}
{{- $values := .root.Values }}
{{- $isNode := ne .role "router" }}
{{- $own := ternary $values.nodes $values.router $isNode }}
{{- $isRoot := and $isNode $values.rdma.enabled $values.rdma.root }}
serviceAccountName: corun-{{ ternary "node" "router" $isNode }}
automountServiceAccountToken: false
enableServiceLinks: false
terminationGracePeriodSeconds: {{ $own.terminationGracePeriodSeconds }}
{{- with $values.images.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  {{- if $isRoot }}
  runAsNonRoot: false
  runAsUser: 0
  runAsGroup: 0
  fsGroup: {{ $values.user }}
  seccompProfile: {type: RuntimeDefault}
  {{- else }}
  {{- include "corun.podSecurity" $root | nindent 2 }}
  {{- end }}
topologySpreadConstraints:
  {{- include "corun.spread" . | nindent 2 }}
{{- if $isNode }}
{{- with $own.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $own.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $own.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- end }}
{{- include "corun.initContainers" . }}
containers:
  - name: {{ .role }}
    image: {{ include "corun.image" (dict "root" $root "name" (ternary "node" "router" $isNode)) }}
    command: [python, -m, {{ ternary (printf "%s_node" .role) "router" $isNode }}]
    args:
      - --config=/etc/corun/cluster.toml
      - --pool=$(POOL)
      {{- if $isNode }}
      - --node-id=$(POD_NAME)
      - --router=corun-routers-$(POOL):50051
      - --host=$(POD_IP)
      - --port={{ include "corun.port" .role }}
      - --nixl-host=$(POD_IP)
      - --nixl-port=50081
      {{- else }}
      - --router-id=$(POD_NAME)
      - --port=50051
      {{- end }}
      - --metrics-host=$(POD_IP)
      - --metrics-port=9100
    env:
      - name: POD_NAME
        valueFrom: {fieldRef: {fieldPath: metadata.name}}
      - name: POD_IP
        valueFrom: {fieldRef: {fieldPath: status.podIP}}
      - name: POOL
        valueFrom: {fieldRef: {fieldPath: "metadata.labels['corun.dev/pool']"}}
      {{- if and $isNode $values.rdma.enabled }}
      - {name: UCX_NET_DEVICES, value: {{ $values.rdma.netDevices | quote }}}
      {{- end }}
      {{- if $values.tracing.enabled }}
      - {name: OTEL_EXPORTER_OTLP_ENDPOINT, value: {{ $values.tracing.endpoint | quote }}}
      {{- end }}
    ports:
      - {name: grpc, containerPort: {{ include "corun.port" .role }}}
      {{- if $isNode }}
      - {name: nixl, containerPort: 50081}
      {{- end }}
      - {name: metrics, containerPort: 9100}
    # The port of the metrics answers from the start of the process to its end, without TLS.
    startupProbe:
      httpGet: {port: 9100, path: /startedz}
      periodSeconds: 5
      timeoutSeconds: 6
      failureThreshold: {{ ternary 360 12 $isNode }}
    readinessProbe:
      httpGet: {port: 9100, path: /readyz}
      periodSeconds: 5
      timeoutSeconds: 6
      failureThreshold: 2
    livenessProbe: # Loading, draining and stuck are alive: those end by themselves.
      httpGet: {port: 9100, path: /livez}
      periodSeconds: 10
      timeoutSeconds: 6
      failureThreshold: 3
    {{- if not $isNode }}
    lifecycle:
      preStop: # New connections go elsewhere before the router refuses them.
        exec: {command: [sleep, "5"]}
    {{- end }}
    resources:
      {{- $extra := dict }}
      {{- if and $isNode $values.nodes.gpus }}{{ $_ := set $extra "nvidia.com/gpu" ($values.nodes.gpus | toString) }}{{ end }}
      {{- if and $isNode $values.rdma.enabled }}{{ $_ := set $extra $values.rdma.resource "1" }}{{ end }}
      {{- toYaml (merge (dict "limits" $extra) (deepCopy $own.resources)) | nindent 6 }}
    securityContext:
      {{- if $isRoot }}
      allowPrivilegeEscalation: false
      readOnlyRootFilesystem: true
      capabilities: {drop: [ALL], add: [IPC_LOCK]}
      {{- else }}
      {{- include "corun.confined" $root | nindent 6 }}
      {{- end }}
    volumeMounts:
      - {name: corun, mountPath: /etc/corun, readOnly: true}
      - {name: model, mountPath: /models, readOnly: true}
      - {name: tmp, mountPath: /tmp}
      {{- if $isNode }}
      - {name: home, mountPath: /home/corun}
      - {name: shm, mountPath: /dev/shm}
      {{- if $values.compileCache.enabled }}
      - {name: compile-cache, mountPath: /home/corun/.cache}
      {{- end }}
      {{- end }}
volumes:
  - name: corun
    projected:
      defaultMode: 0440
      sources:
        - configMap:
            name: {{ include "corun.configName" $root }}
            items:
              - {key: cluster.toml, path: cluster.toml}
        - secret:
            name: corun-tls
            items:
              - {key: tls.crt, path: tls/tls.crt}
              - {key: tls.key, path: tls/tls.key}
              - {key: ca.crt, path: tls/ca.crt}
        - secret:
            name: corun-cluster-token
            items:
              - {key: cluster.token, path: cluster/cluster.token}
        {{- if not $isNode }}
        - secret:
            name: corun-client-tokens
            items:
              - {key: clients.tokens, path: clients/clients.tokens}
        - secret:
            name: corun-seed-key
            items:
              - {key: seed.key, path: seed/seed.key}
        {{- end }}
  - name: model
    {{- if eq $values.model.source "volume" }}
    persistentVolumeClaim: {claimName: {{ $values.model.volume.claim }}, readOnly: true}
    {{- else if eq $values.model.source "image" }}
    image:
      {{- toYaml $values.model.image | nindent 6 }}
    {{- else }}
    emptyDir: {}
    {{- end }}
  - name: tmp
    emptyDir: {sizeLimit: 1Gi}
  {{- if $isNode }}
  - name: home # Caches of vLLM, torch and Triton.
    emptyDir: {sizeLimit: 10Gi}
  - name: shm
    emptyDir: {medium: Memory, sizeLimit: 4Gi}
  {{- if $values.compileCache.enabled }}
  - name: compile-cache
    persistentVolumeClaim: {claimName: {{ $values.compileCache.claim }}}
  {{- end }}
  {{- end }}
{{- end }}

{{/* What comes before a router or node: its model, and a look at what its host lets it lock. */}}
{{- define "corun.initContainers" -}}
{{- $values := .root.Values }}
{{- $locks := and (ne .role "router") $values.rdma.enabled (not $values.rdma.root) }}
{{- if or $locks (has $values.model.source (list "fetch" "tiny")) }}
initContainers:
  {{- if $locks }}
  - name: memlock
    image: {{ include "corun.image" (dict "root" .root "name" "router") }}
    command: [sh, -c]
    args:
      - |
        test "$(ulimit -l)" = unlimited || {
          echo "containers may lock $(ulimit -l) KiB here: see components/rdma" >&2
          exit 1
        }
    resources:
      requests: {cpu: 10m, memory: 16Mi}
      limits: {memory: 64Mi}
    securityContext:
      {{- include "corun.confined" . | nindent 6 }}
  {{- end }}
  {{- if eq $values.model.source "fetch" }}
  -
    {{- include "corun.fetch" .root | nindent 4 }}
  {{- else if eq $values.model.source "tiny" }}
  - name: model
    image: {{ include "corun.image" (dict "root" .root "name" "node") }}
    command: [corun, model, /models/tiny]
    resources:
      requests: {cpu: 100m, memory: 256Mi}
      limits: {memory: 512Mi}
    securityContext:
      {{- include "corun.confined" . | nindent 6 }}
    volumeMounts:
      - {name: model, mountPath: /models}
      - {name: tmp, mountPath: /tmp}
  {{- end }}
{{- end }}
{{- end }}
