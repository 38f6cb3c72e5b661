{{/* A setting's value as its environment variable has it. YAML's numbers arrive as floats: 1073741824 must not become
1.073741824e+09. Lists are joined with commas. */}}
{{- define "tandem.settingText" -}}
{{- if kindIs "slice" . -}}
{{ join "," . }}
{{- else if and (kindIs "float64" .) (eq . (floor .)) -}}
{{ int64 . }}
{{- else -}}
{{ . }}
{{- end -}}
{{- end }}

{{/* What a process is told: first what follows from the chart, then `settings`, then `extraEnv`. */}}
{{- define "tandem.environment" -}}
{{- $values := index .root.Values .role -}}
{{- $prefix := printf "TANDEM_%s_" (upper .role) -}}
- {name: POD_IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
- {name: {{ $prefix }}HOST, value: "0.0.0.0"}
- {name: {{ $prefix }}PORT, value: {{ include "tandem.port" . | quote }}}
- {name: {{ $prefix }}MODEL, value: {{ include "tandem.modelArgument" .root | quote }}}
{{- if eq .role "proxy" }}
{{ include "tandem.discoveryEnvironment" .root | trim }}
{{- else }}
- {name: {{ $prefix }}CONTROL_HOST, value: "$(POD_IP)"}
{{- end }}
{{- if include "tandem.serviceTokenSecret" .root }}
- {name: {{ $prefix }}SERVICE_TOKEN_FILE, value: /etc/tandem/service-token/{{ .root.Values.serviceToken.key }}}
{{- end }}
{{- if and (eq .role "proxy") .root.Values.apiKeys.existingSecret }}
- {name: TANDEM_PROXY_API_KEYS_FILE, value: /etc/tandem/api-keys/{{ .root.Values.apiKeys.key }}}
{{- end }}
{{- with include "tandem.numThreads" . }}
- {name: {{ $prefix }}NUM_THREADS, value: {{ . | quote }}}
{{- end }}
{{- range $name, $value := $values.settings }}
{{- if not (kindIs "invalid" $value) }}
- {name: {{ $prefix }}{{ upper $name }}, value: {{ include "tandem.settingText" $value | quote }}}
{{- end }}
{{- end }}
{{- range $values.extraEnv }}
{{- if hasPrefix $prefix .name }}
{{- fail (printf "%s.extraEnv: %s is a setting; put %s under %s.settings" $.role .name (.name | trimPrefix $prefix | lower) $.role) }}
{{- end }}
- {{ toJson . }}
{{- end }}
{{- end }}

{{/* An engine would count the node's processors, not those that its container may use. Whole ones of the limit, else of
the request; empty where nothing says or `settings` does. */}}
{{- define "tandem.numThreads" -}}
{{- $values := index .root.Values .role -}}
{{- $limits := $values.resources.limits | default dict -}}
{{- $requests := $values.resources.requests | default dict -}}
{{- $cpus := $limits.cpu | default $requests.cpu | default "" | toString -}}
{{- if and (ne .role "proxy") $cpus (not $values.settings.num_threads) -}}
{{- $count := hasSuffix "m" $cpus | ternary (divf (trimSuffix "m" $cpus) 1000) (float64 $cpus) -}}
{{ max 1 (ceil $count | int) }}
{{- end -}}
{{- end }}

{{- define "tandem.discoveryEnvironment" -}}
{{- $discovery := .Values.proxy.discovery -}}
{{- if eq $discovery "kubernetes" -}}
- {name: TANDEM_PROXY_DISCOVERY, value: kubernetes}
- {name: TANDEM_PROXY_DISCOVERY_NAMESPACE, valueFrom: {fieldRef: {fieldPath: metadata.namespace}}}
{{- range $role := list "prompt" "completion" }}
- {name: TANDEM_PROXY_{{ upper $role }}_SELECTOR, value: "kubernetes.io/service-name={{ include "tandem.name" (dict "root" $ "role" $role) }}"}
{{- end }}
{{- else -}}
{{- if eq $discovery "dns" -}}
- {name: TANDEM_PROXY_DISCOVERY, value: dns}
{{ else -}}
{{- range $role := list "prompt" "completion" }}
{{- if or (gt (int (index $.Values $role).replicas) 1) (include "tandem.isScaled" (dict "root" $ "role" $role)) }}
{{- fail (printf "proxy.discovery: static knows one engine of each role, %s may have more; use kubernetes or dns" $role) }}
{{- end }}
{{- end }}
{{- end -}}
{{- range $role := list "prompt" "completion" }}
{{- $engines := dict "root" $ "role" $role -}}
- {name: TANDEM_PROXY_{{ upper $role }}_URL, value: "http://{{ include "tandem.name" $engines }}.{{ $.Release.Namespace }}.svc:{{ include "tandem.port" $engines }}"}
{{ end }}
{{- end }}
{{- end }}
