{{/* Name of the Secret with the token that engines want to see; empty where everybody may ask them. */}}
{{- define "tandem.serviceTokenSecret" -}}
{{- if .Values.serviceToken.existingSecret -}}
{{ .Values.serviceToken.existingSecret }}
{{- else if .Values.serviceToken.generate -}}
{{ include "tandem.fullname" . }}-service-token
{{- end -}}
{{- end }}

{{/* As files, which the processes read again when they change. */}}
{{- define "tandem.secretVolumes" -}}
{{- with include "tandem.serviceTokenSecret" .root }}
- {name: service-token, secret: {secretName: {{ . }}, defaultMode: 0440}}
{{- end }}
{{- if and (eq .role "proxy") .root.Values.apiKeys.existingSecret }}
- {name: api-keys, secret: {secretName: {{ .root.Values.apiKeys.existingSecret }}, defaultMode: 0440}}
{{- end }}
{{- end }}

{{- define "tandem.secretMounts" -}}
{{- if include "tandem.serviceTokenSecret" .root }}
- {name: service-token, mountPath: /etc/tandem/service-token, readOnly: true}
{{- end }}
{{- if and (eq .role "proxy") .root.Values.apiKeys.existingSecret }}
- {name: api-keys, mountPath: /etc/tandem/api-keys, readOnly: true}
{{- end }}
{{- end }}
